"""Hands trained weights to an engine that generates: one manifest and one IPC buffer a lifetime, groups of tensors with a version on each.

``.manifest`` says what is sent (``.tensor_info`` one weight), ``.layout`` where it lies, and ``.packing`` takes it from the
model. On one machine ``.shared_memory`` and ``.ipc_buffer`` hold it, ``.sender`` fills it on the ranks of the policy and
``.receiver`` reads it on those of the engine. Between machines ``.rendezvous`` brings both together, ``.stages`` says which pipeline
stage sends what, ``.transfer_group`` joins the ranks, ``.channel`` has the buffers, ``.delta_channel`` sends what changed alone,
and ``.broadcast`` is a refit from either side.
"""
