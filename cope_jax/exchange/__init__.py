"""Reads and writes models in the formats of GPT-2, Llama, BERT and ELMo, and in our own format."""
