"""Megatron-Core's checkpoint format ``torch_dist``, read and written without Megatron-Core and without
process groups.

A directory of it is what ``torch.distributed.checkpoint`` writes (``.metadata``, an index, and ``*.distcp``,
files of serialised tensors), with ``metadata.json`` and ``common.pt`` beside it. ``keys`` says under which
key a parameter stands, ``index`` reads and writes the index, ``items`` finds the bytes of a serialised
tensor, ``reader`` and ``writer`` put them together, ``find`` looks for the directory where several trainers
put it.
"""
