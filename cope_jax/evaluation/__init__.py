"""Evaluation of trained models: reports, perplexity of text, gates and contextual vectors."""
