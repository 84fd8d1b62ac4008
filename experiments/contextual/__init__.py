"""Commands for contextual representations: tag, classify, neighbours, probe, floors, language_models."""
