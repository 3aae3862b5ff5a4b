"""Mapping rules between Hugging Face checkpoints and Megatron-Core parameters.

Needs torch, safetensors, transformers and huggingface_hub; imports neither megarl nor Megatron-Core, so that
weights can be checked, read and written where no training stack is installed. The package itself imports
nothing: take what is needed from its modules.
"""
