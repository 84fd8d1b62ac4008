"""The benchmark `python -m experiments.benchmark`: what it measures, and its contenders."""
