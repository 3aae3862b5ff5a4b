"""Model facts in a Hugging Face config, and their translation to Megatron-Core's settings."""
