"""Files of conversions and of the trainer's checkpoints: written atomically, hashed, signed, and read without
running code.

The package belongs to the converters, which work without the trainer. The trainer imports the package, but
the package may not import the trainer.
"""
