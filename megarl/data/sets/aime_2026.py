"""AIME 2026: 30 problems. The answers are stored as numbers."""

from megarl.data.rows import NamedSet

SET = NamedSet("MathArena/aime_2026", "problem", "answer")
