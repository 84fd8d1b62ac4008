"""What every command shares: flags of distributed runs, and errors in one line."""
