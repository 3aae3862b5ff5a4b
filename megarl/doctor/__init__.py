"""``megarl doctor``: what this machine has, which parts of it work, and how to install what is missing. There
is one file per kind of check."""
