"""HotpotQA: questions whose answers need two paragraphs of Wikipedia; each has these and eight others with
it, which
can be searched."""

from megarl.data.rows import NamedSet

SET = NamedSet("hotpotqa/hotpot_qa", "question", "answer", subsets=("distractor",))
