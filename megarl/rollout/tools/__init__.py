"""Tools that the policy may call: built-in and user-defined tools, and parsers of the calls in its
responses."""
