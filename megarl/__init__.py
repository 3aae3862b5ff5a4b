"""megarl: reinforcement learning of language models on Megatron-Core, at any scale, provable on a CPU.

Importing this package imports neither torch nor ray; each room imports what it needs.
"""

__version__ = "0.1.0"
