"""Text and tokens from a trained model."""
