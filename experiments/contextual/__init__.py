"""Commands on contextual representations: tag, classify, neighbours, probe, floors, language_models."""
