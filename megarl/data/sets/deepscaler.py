"""DeepScaleR: about 40,000 competition problems."""

from megarl.data.rows import NamedSet

SET = NamedSet("agentica-org/DeepScaleR-Preview-Dataset", "problem", "answer")
