"""``megarl doctor``: what this machine has, what of it works, and how to get what is missing. One file a kind
of question."""
