"""Mapping between Hugging Face tensors and Megatron-Core parameters: rules, tensor-parallel layouts, and both
formats seen as one model."""
