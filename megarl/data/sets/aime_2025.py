"""AIME 2025: the 15 problems of either day, in a subset each."""

from megarl.data.rows import NamedSet

SET = NamedSet(
    "opencompass/AIME2025", "question", "answer", split="test", subsets=("AIME2025-I", "AIME2025-II")
)
