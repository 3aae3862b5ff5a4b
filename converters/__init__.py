"""Conversion of checkpoints between Hugging Face and Megatron-Core.

Needs torch, safetensors, transformers and huggingface_hub, but neither megarl nor Megatron-Core, so that
weights can be checked and converted where no training stack is installed. Import from the modules: this file
imports nothing.
"""
