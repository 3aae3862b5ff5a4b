"""OpenMathInstruct-2: problems with their expected answers; its first million where no split is given, as in
NeMo-RL."""

from megarl.data.rows import NamedSet

SET = NamedSet("nvidia/OpenMathInstruct-2", "problem", "expected_answer", split="train_1M")
