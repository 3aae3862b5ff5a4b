"""Files of stored checkpoints: tensors read by slices, directories written atomically, manifests, dtypes,
quantised formats."""
