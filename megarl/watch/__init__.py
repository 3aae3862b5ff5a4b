"""Observation of a run from outside, during training or afterwards: its status, and its curves as one
page."""
