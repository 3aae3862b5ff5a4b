"""AIME 2024: 30 problems."""

from megarl.data.rows import NamedSet

SET = NamedSet("HuggingFaceH4/aime_2024", "problem", "answer")
