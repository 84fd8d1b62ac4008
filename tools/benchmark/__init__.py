"""The benchmark `python -m tools.benchmark`: what it measures, and its contenders."""
