"""What is saved: blocks and manifests in a `BlockStore`, with checksums, under one quota for all models."""
