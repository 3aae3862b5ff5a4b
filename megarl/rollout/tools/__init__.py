"""Tools that a policy may call in its responses: parsers of the calls that models write, and built-in
tools."""
