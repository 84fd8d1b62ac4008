"""Configs of experiments, one file for each."""
