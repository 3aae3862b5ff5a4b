"""Facts of a model that its Hugging Face config states, and their translation to Megatron-Core's settings."""
