"""A `BlockStore` in a local directory."""
