"""Megatron-Core checkpoints of other trainers: their settings of the model, and the locations of its
parameters.

``opening`` reads what Megatron-LM (also slime) stores next to the tensors. ``settings`` translates it, and
the ``run_config.yaml`` of Megatron-Bridge, to the names of Megatron-Core's configuration. ``known_settings``
lists the meaning of each name for the forward pass, ``hf_config`` derives a Hugging Face config, and
``agreement`` checks that config and settings describe the same function. ``view`` presents the tensors of any
known layout under the keys of ``converters.torch_dist.keys``, and ``arguments`` writes what Megatron-LM
needs.
"""
