"""Folders in buckets of Google Cloud Storage (`gs://`) and S3 (`s3://`): objects, locks, and local mirrors.

A command works in a local folder, its mirror, and a `Mirror` copies files between the folder and the bucket. An object
appears in a bucket completely or not at all. Files are copied before the checkpoint that belongs to them, and the last
object of a checkpoint is a marker. So a bucket always holds a state from which a run can resume.
"""

from cope_jax.buckets.bucket import Bucket as Bucket
from cope_jax.buckets.mirror import COMPLETE as COMPLETE
from cope_jax.buckets.mirror import Mirror as Mirror
from cope_jax.buckets.mirror import mirrored as mirrored
from cope_jax.buckets.mirror import shown as shown
from cope_jax.buckets.mirror import unlink as unlink
