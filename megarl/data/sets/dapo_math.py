"""DAPO-Math-17k: problems with integer answers, in verl's format. Each problem is stored about a hundred
times."""

from megarl.data.rows import NamedSet

SET = NamedSet("BytedTsinghua-SIA/DAPO-Math-17k", "prompt[0].content", "reward_model.ground_truth")
