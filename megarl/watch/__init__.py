"""A run seen from outside, while it trains or afterwards: where it stands, and its curves as one page."""
