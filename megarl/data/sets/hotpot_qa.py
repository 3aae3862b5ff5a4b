"""HotpotQA: questions whose answers need two paragraphs of Wikipedia. Each row also contains eight other
paragraphs; all can be searched."""

from megarl.data.rows import NamedSet

SET = NamedSet("hotpotqa/hotpot_qa", "question", "answer", subsets=("distractor",))
