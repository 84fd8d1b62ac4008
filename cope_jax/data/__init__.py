"""Input pipelines: batches (`pipeline`), tasks on disk (`tfds_builder`), downloads (`fetch`)."""
