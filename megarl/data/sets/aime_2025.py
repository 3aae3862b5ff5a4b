"""AIME 2025: 30 problems, in one subset per day of 15 each."""

from megarl.data.rows import NamedSet

SET = NamedSet(
    "opencompass/AIME2025", "question", "answer", split="test", subsets=("AIME2025-I", "AIME2025-II")
)
