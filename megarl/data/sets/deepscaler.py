"""DeepScaleR: about 40,000 problems of competitions."""

from megarl.data.rows import NamedSet

SET = NamedSet("agentica-org/DeepScaleR-Preview-Dataset", "problem", "answer")
