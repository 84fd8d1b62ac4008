"""Reads and writes models in the formats of transformers and of ELMo, and in our own format."""
