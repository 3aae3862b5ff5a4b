"""Which checkpoints are worth keeping. A pure decision; nothing is deleted here."""

from __future__ import annotations

from collections.abc import Mapping


def ranked_steps(metrics: Mapping[int, float | None], higher_is_better: bool) -> list[int]:
    """Steps from best to worst.

    Args:
        metrics: per step its metric; None when the checkpoint has none.
        higher_is_better: whether a larger metric is better.

    Returns:
        Checkpoints with a metric first, best first, the newer of equals first; then those without one, newest first.
    """

    def badness(step: int) -> tuple[bool, float, int]:
        value = metrics[step]
        if value is None:
            return True, 0.0, -step
        return False, -value if higher_is_better else value, -step

    return sorted(metrics, key=badness)


def steps_to_keep(
    metrics: Mapping[int, float | None], keep_top_k: int | None, higher_is_better: bool, keep_latest: bool = True
) -> set[int]:
    """The best ``keep_top_k`` steps, and the latest one besides; all of them when ``keep_top_k`` is None.

    As long as there is a checkpoint at all, one is kept.
    """
    if keep_top_k is None:
        return set(metrics)
    kept = set(ranked_steps(metrics, higher_is_better)[:keep_top_k])
    if metrics and (keep_latest or not kept):
        kept.add(max(metrics))
    return kept
