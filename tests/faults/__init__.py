"""Faults in whole runs of a configuration, and what has to be true after each: ``python -m tests.faults
--help``."""
