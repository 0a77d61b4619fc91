"""The weight cache: tensors by name, under a byte budget."""
