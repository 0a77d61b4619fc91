"""The pack: a model's weights in the forms that the kernels use, as one file; and where weights come from."""
