"""Checkpoints of Megatron-Core that other trainers wrote: what they say about their model, and where they
keep its parameters.

``common_state`` and ``run_config`` read what Megatron-LM (slime too) and Megatron-Bridge leave beside the
tensors, ``settings`` puts it under the names of Megatron-Core's own configuration, ``known_settings`` says
what each name means for the forward pass, ``hf_config`` makes a Hugging Face config of them, ``agreement``
proves that config and settings describe the same function. ``view`` shows the tensors of any of the layouts
in use under the keys of ``converters.torch_dist.keys``, ``arguments`` writes what Megatron-LM wants to find.
"""
