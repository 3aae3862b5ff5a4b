"""``megarl doctor``: report what this machine has, which parts of it work, and how to install what is
missing. Each kind of check has a file."""
