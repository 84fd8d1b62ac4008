"""Files, locks, checkpoints, and folders in buckets of Google Cloud (`gs://`) and S3 (`s3://`).

`files` decides which names may be written; every file appears completely or not at all. A
checkpoint is a folder on disk (`checkpoint_folder`) or objects in a bucket (`checkpoint_bucket`);
`Checkpoints` chooses. A command whose workdir is in a bucket works in a local folder, its mirror,
and a `Mirror` copies files between the two. Files are copied before the checkpoint that belongs to
them, and the last object of a checkpoint is a marker, so a bucket always holds a state from which a
run can resume.
"""
