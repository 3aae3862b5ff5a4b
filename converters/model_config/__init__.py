"""Facts of a model that its Hugging Face config states, and the same facts as Megatron-Core's settings."""
