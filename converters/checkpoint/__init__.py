"""Files of stored checkpoints: tensors read by slices, directories written whole or not at all, manifests,
dtypes, quantised formats."""
