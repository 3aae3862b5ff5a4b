"""A run from its configuration to its last step: checks, start, loop, resume, stop, evaluation."""
