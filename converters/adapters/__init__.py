"""Convert LoRA adapters between PEFT's directories and Megatron-Bridge's adapters in ``torch_dist``
checkpoints.

Megatron-Core itself has no adapters. Megatron-Bridge (release 0.3.1) adds two linear layers to a layer:
``.adapter.linear_in`` [rank, in] and ``.adapter.linear_out`` [out, rank]. Their product times alpha / rank is
added to the layer's output.
"""
