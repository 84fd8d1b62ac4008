"""What `python -m experiments.benchmark` measures, and with whom."""
