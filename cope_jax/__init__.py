"""A laboratory for position encodings in JAX: Contextual Position Encoding (CoPE) against its rivals."""

__version__ = "0.1.0"
