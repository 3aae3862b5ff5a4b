"""File handling for conversions and training checkpoints: atomic writes, hashes, signatures, and reading
without executing code.

The converters work without the trainer, so this package must not import ``megarl``; the trainer imports it.
"""
