"""Hands trained weights to an engine that generates: one manifest and one IPC buffer a lifetime, groups of
tensors with a version on each.

``.manifest`` says what is sent and takes it from the model, ``.plan`` where it is stored. On one machine
``.ipc`` holds it, ``.session`` fills it on the ranks of the policy and reads it on those of the engine, and
by ``.mailbox`` they tell one another when. Between machines ``.rendezvous`` brings both together and misses
those that are gone, ``.transfer_group`` joins the ranks, and ``.broadcast`` is a refit from either side.
"""
