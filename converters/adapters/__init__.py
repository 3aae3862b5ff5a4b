"""LoRA adapters by themselves: PEFT's directories, and what Megatron-Bridge keeps of adapters in
``torch_dist`` checkpoints.

Megatron-Core has no adapters; the form is that of Megatron-Bridge (read in its release 0.3.1), which puts two
linear layers beside one of Megatron-Core, ``.adapter.linear_in`` [rank, in] and ``.adapter.linear_out`` [out,
rank], and adds alpha / rank times their product to its output.
"""
