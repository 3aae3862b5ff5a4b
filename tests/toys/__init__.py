"""Things that a user might add, each in one file: what a new algorithm, environment, engine and reward need,
and no more."""
