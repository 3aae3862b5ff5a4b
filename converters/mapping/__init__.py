"""Map Hugging Face tensors to Megatron-Core parameters: rules, tensor-parallel layouts, and a common view of
models in both formats."""
