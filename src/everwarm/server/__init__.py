"""HTTP in front of a model."""
