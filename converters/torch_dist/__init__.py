"""Megatron-Core's checkpoint format ``torch_dist``, read and written without Megatron-Core and without
process groups.

A checkpoint directory holds the files of ``torch.distributed.checkpoint`` (an index ``.metadata``, and
``*.distcp`` files of serialised tensors), and ``metadata.json`` and ``common.pt``. ``keys`` gives the key of
a parameter, ``index`` reads and writes the index, ``items`` finds the bytes of a serialised tensor,
``reader`` and ``writer`` read and write checkpoints, and ``location`` finds the directory where a trainer
keeps one.
"""
