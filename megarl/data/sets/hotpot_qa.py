"""HotpotQA: questions whose answers take two paragraphs of Wikipedia; each has these and eight others beside
it, which can be searched."""

from megarl.data.rows import NamedSet

SET = NamedSet("hotpotqa/hotpot_qa", "question", "answer", subsets=("distractor",))
