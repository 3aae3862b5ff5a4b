"""Generation by vLLM, with weights that arrive from the policy through vLLM's own weight-transfer interface.

:mod:`.weight_engines` receives weights inside the workers of vLLM, :mod:`.plugin` makes them known there, :mod:`.worker` holds one engine,
:mod:`.requests` translates batches, and :class:`~megarl.models.generation.vllm.generation.VllmGeneration` is what a driver uses.
"""
