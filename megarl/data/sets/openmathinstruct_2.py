"""OpenMathInstruct-2: problems with expected answers. The default split is the first million, as in
NeMo-RL."""

from megarl.data.rows import NamedSet

SET = NamedSet("nvidia/OpenMathInstruct-2", "problem", "expected_answer", split="train_1M")
