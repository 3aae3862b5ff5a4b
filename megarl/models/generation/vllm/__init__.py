"""Generation by vLLM. Weights arrive from the policy through vLLM's own weight-transfer interface.

A driver uses ``VllmGeneration``; ``.worker`` runs one engine, and ``.requests`` converts batches. Inside
vLLM's workers, ``.weight_engines`` receives weights, and ``.plugin`` registers these weight engines.
"""
