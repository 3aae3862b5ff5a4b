"""Mapping between Hugging Face tensors and Megatron-Core parameters: rules, tensor-parallel layouts, and one
view of a model for both formats."""
