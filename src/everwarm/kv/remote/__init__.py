"""A `BlockStore` in object storage (S3, GCS, Azure), with a cache on disk in front of it."""
