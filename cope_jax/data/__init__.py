"""Input pipelines: batches of a task (`pipeline`), tasks on disk (`tfds_builder`), and downloads (`fetch`)."""
