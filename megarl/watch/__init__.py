"""Commands that show a run from outside, while it trains or afterwards: status, samples, and the report
page."""
