"""Input pipelines: tasks as batches (`pipeline`), and tasks on disk (`tfds_builder`)."""
