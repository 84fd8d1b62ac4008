"""Likelihood and perplexity of text under a model, and tasks of lm-evaluation-harness."""
