"""Generation by vLLM, with weights that arrive from the policy through vLLM's own weight-transfer interface.

``.weight_engines`` receives weights inside the workers of vLLM, ``.plugin`` makes them known there,
``.worker`` holds one engine, ``.requests`` translates batches, and ``VllmGeneration`` is what a driver uses.
"""
