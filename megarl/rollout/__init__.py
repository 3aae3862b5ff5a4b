"""Rollouts: responses to prompts, their scores from an environment, and the samples that an algorithm trains
on."""
