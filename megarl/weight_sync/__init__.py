"""Hands trained weights to an engine that generates: one manifest and one arena a lifetime, groups of tensors with a version on each.

:mod:`.manifest` says what is sent and where it lies, :mod:`.shared_memory` and :mod:`.arena` hold it, :mod:`.sender` fills it on the ranks
of the policy and :mod:`.receiver` reads it on those of the engine.
"""
