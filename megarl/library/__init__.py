"""megarl as a library: ``megarl.train``, ``megarl.eval`` and ``megarl.convert``, for scripts and notebooks.

Each call writes a configuration, runs the same command as a shell would in a separate process, and shows what
the command prints. So a notebook keeps its memory, its signal handlers and its own Ray, and survives a run
that ends in any way.
"""
