"""Contextual vectors of words: embedders, neighbours, senses, probes and baselines."""
