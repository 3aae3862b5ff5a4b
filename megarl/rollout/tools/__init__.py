"""Tools that a policy may call while it responds: how calls are written by models, and tools that megarl
brings."""
