"""Evaluation: errors on splits and lengths, tables, plots, and maps of attention."""
