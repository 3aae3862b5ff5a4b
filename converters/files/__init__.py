"""Files as conversions and the trainer's checkpoints read and write them: whole or not at all, hashed,
signed, running no code.

The package is among the converters, which work without the trainer; the trainer imports them, and they may
not import it.
"""
