"""Stages of a run: checks before the start, start, training loop, checkpoints, resume, stop, evaluation."""
