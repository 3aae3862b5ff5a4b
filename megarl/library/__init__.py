"""megarl as a library: ``megarl.train``, ``megarl.eval`` and ``megarl.convert``, for scripts and notebooks.

Each call writes a configuration, runs the same command as a shell would in a process of its own, and shows
what that prints. So a notebook keeps its memory, its signal handlers and its own Ray, and a run may end in
any way without the notebook.
"""
