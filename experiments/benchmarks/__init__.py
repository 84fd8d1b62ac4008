"""What experiments.benchmark measures, one module for each subject."""
