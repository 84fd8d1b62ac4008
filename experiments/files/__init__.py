"""Commands that read and write files: convert, download, export."""
