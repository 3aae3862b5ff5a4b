"""LoRA adapters by themselves: PEFT's directories, and Megatron-Bridge's adapters in ``torch_dist``
checkpoints.

Megatron-Core has no adapters. The format is that of Megatron-Bridge (as its release 0.3.1 reads): two linear
layers next to a layer of Megatron-Core, ``.adapter.linear_in`` [rank, in] and ``.adapter.linear_out`` [out,
rank], whose product times alpha / rank is added to the layer's output.
"""
