"""Formats of other programs, and our own as safetensors: GPT-2, Llama, BERT, ELMo."""
