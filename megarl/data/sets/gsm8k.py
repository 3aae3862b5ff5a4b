"""GSM8K: word problems of arithmetic, whose solutions end with the answer after four number signs."""

from megarl.data.rows import NamedSet


def _after_number_signs(solution: str) -> str:
    """Return the number after ``####``, without thousands separators."""
    _, found, answer = solution.rpartition("####")
    if not found or not answer.strip():
        raise ValueError(f"there is no answer after ####; it ends {solution[-60:]!r}")
    return answer.strip().replace(",", "")


SET = NamedSet("openai/gsm8k", "question", "answer", subsets=("main",), answer=_after_number_signs)
