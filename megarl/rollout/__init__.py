"""Rollouts: responses to prompts, what an environment says of them, and the samples that an algorithm trains
on."""
