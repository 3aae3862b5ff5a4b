"""Generation by vLLM, with weights that arrive from the policy through vLLM's own weight-transfer interface.

``.weight_engines`` receives weights inside the workers of vLLM, ``.plugin`` registers these weight engines
there, ``.worker`` holds one engine, ``.requests`` converts batches, and a driver uses ``VllmGeneration``.
"""
