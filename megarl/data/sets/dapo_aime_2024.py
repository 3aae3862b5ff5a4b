"""AIME 2024 as DAPO publishes it: in verl's form, each problem 32 times, of which one is taken."""

from megarl.data.rows import NamedSet

SET = NamedSet("BytedTsinghua-SIA/AIME-2024", "prompt[0].content", "reward_model.ground_truth", once=True)
