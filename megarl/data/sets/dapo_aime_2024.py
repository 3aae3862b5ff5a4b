"""AIME 2024 as published by DAPO in verl's format. Each problem is stored 32 times and read once."""

from megarl.data.rows import NamedSet

SET = NamedSet("BytedTsinghua-SIA/AIME-2024", "prompt[0].content", "reward_model.ground_truth", once=True)
