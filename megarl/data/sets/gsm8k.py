"""GSM8K: arithmetic word problems. Solutions end with ``####`` and the answer."""

from megarl.data.rows import NamedSet


def _after_number_signs(solution: str) -> str:
    """Return the number after ``####``, without thousands separators."""
    _, found, answer = solution.rpartition("####")
    if not found or not answer.strip():
        raise ValueError(f"there is no answer after ####; it ends {solution[-60:]!r}")
    return answer.strip().replace(",", "")


SET = NamedSet("openai/gsm8k", "question", "answer", subsets=("main",), answer=_after_number_signs)
