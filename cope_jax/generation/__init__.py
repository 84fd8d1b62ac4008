"""Generates text and tokens with a trained model."""
