"""A toy reward: the share of the reference answer's characters that the response has in the same places."""


def reward(response: str, answer: str) -> float:
    """Between 0 and 1."""
    return sum(a == b for a, b in zip(response.strip(), answer, strict=False)) / len(answer)
