"""Read Megatron-Core checkpoints of other trainers: their model settings and the locations of parameters.

``opening`` reads what Megatron-LM (also slime) stores next to the tensors. ``settings`` translates that, and
Megatron-Bridge's ``run_config.yaml``, to the names of Megatron-Core's config. ``known_settings`` lists the
effect of each setting, ``hf_config`` derives a Hugging Face config, and ``agreement`` checks that config and
settings describe the same function. ``view`` maps tensors of any known layout to the keys of
``converters.torch_dist.keys``. ``arguments`` writes what Megatron-LM needs.
"""
