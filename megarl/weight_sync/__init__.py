"""Transfer of trained weights to a rollout engine, with one manifest and one IPC buffer per lifetime, in
groups of tensors that each carry a version.

``.manifest`` defines what is sent and takes it from the model, ``.plan`` its layout in a buffer. On one
machine ``.ipc`` holds the weights, ``.session`` writes them on the policy's ranks and reads them on the
engine's ranks, and ``.mailbox`` synchronises the two. Between machines ``.rendezvous`` connects both sides
and detects ranks that are gone, ``.transfer_group`` joins the ranks, and ``.broadcast`` runs a refit on
either side.
"""
