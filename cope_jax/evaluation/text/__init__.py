"""Likelihood and perplexity of text under a model."""
