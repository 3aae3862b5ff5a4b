"""Mapping rules between Hugging Face checkpoints and Megatron-Core parameters.

The package needs torch, safetensors, transformers and huggingface_hub. It imports neither megarl nor
Megatron-Core, so that weights can be checked, read and written where no training stack is installed.
``__init__`` imports nothing: import what you need from the modules.
"""
