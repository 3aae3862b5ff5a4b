"""Files of checkpoints: read slices of tensors, write directories atomically, manifests, dtypes, quantised
formats."""
