"""Refit: transfer of trained weights from the policy to a rollout engine.

``manifest`` lists the weight tensors, and ``plan`` lays them out in a buffer. Colocated engines read them
from shared memory: ``ipc`` allocates it, ``session`` writes it on the policy's ranks and reads it on the
engine's, and ``mailbox`` synchronises the two. Engines on other devices receive broadcasts: ``rendezvous``
connects both sides and detects lost ranks, ``transfer_group`` creates the process groups, and ``broadcast``
runs a refit on either side. The manifest and the buffers live as long as the connection; every group of
tensors that is sent carries the version of the weights.
"""
