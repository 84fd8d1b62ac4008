"""Reads and writes models: the formats of GPT-2, Llama, BERT and ELMo, and our own, in safetensors."""
