"""Read and write Megatron-Core's ``torch_dist`` checkpoints, without Megatron-Core and process groups.

A checkpoint contains the files of ``torch.distributed.checkpoint`` (an index ``.metadata``, and ``*.distcp``
files of serialised tensors), ``metadata.json`` and ``common.pt``. ``keys`` gives the key of a parameter,
``index`` reads and writes the index, ``items`` locates the bytes of a serialised tensor, ``reader`` and
``writer`` read and write checkpoints, and ``location`` finds a checkpoint in a trainer's directory.
"""
