"""Hands trained weights to an engine that generates: one manifest and one arena a lifetime, groups of tensors with a version on each.

:mod:`.manifest` says what is sent (:mod:`.tensor_info` one weight), :mod:`.layout` where it lies, and :mod:`.packing` takes it from the
model. On one machine :mod:`.shared_memory` and :mod:`.arena` hold it, :mod:`.sender` fills it on the ranks of the policy and
:mod:`.receiver` reads it on those of the engine. Between machines :mod:`.meeting` brings both together, :mod:`.stages` says which pipeline
stage sends what, :mod:`.transfer_group` joins the ranks, :mod:`.channel` has the buffers, :mod:`.delta_channel` sends what changed alone,
and :mod:`.broadcast` is a refit from either side.
"""
