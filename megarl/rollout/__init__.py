"""Sampling of responses, their scores from an environment, and the samples that an algorithm trains on."""
