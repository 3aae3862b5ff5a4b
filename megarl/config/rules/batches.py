"""Rules on how samples divide into global batches, ranks and micro-batches, and on tokens a micro-batch."""

from __future__ import annotations

import math
from collections.abc import Iterator

from megarl.config.arithmetic import sequence_share
from megarl.config.rules.parallel import axis_sizes, layout_of, sequence_parallel_key
from megarl.config.rules.view import Rule, View
from megarl.errors import Violation

GLOBAL = "policy.train_global_batch_size"
MICRO = "policy.train_micro_batch_size"
PACKING = "policy.sequence_packing"
DYNAMIC = "policy.dynamic_batching"


def samples_fill_global_batches(view: View) -> Iterator[Violation]:
    """A GRPO step trains on all its samples."""
    view.require(view["algorithm"] == "grpo")
    prompts, generations = view["grpo.num_prompts_per_step"], view["grpo.num_generations_per_prompt"]
    size = view[GLOBAL]
    view.require(min(prompts, generations, size) >= 1)
    if prompts * generations % size:
        bound = f"it must divide the {prompts} prompts x {generations} answers = {prompts * generations} samples of a step"
        yield Violation(GLOBAL, size, bound, f"write {prompts * generations} or a divisor of it")


def global_batch_divides(view: View) -> Iterator[Violation]:
    """A global batch divides over the data-parallel ranks and their micro-batches."""
    yield from _divides(view, GLOBAL, MICRO)


def validation_batch_divides(view: View) -> Iterator[Violation]:
    """The same for validation."""
    view.require(view["algorithm"] == "sft" and (view["sft.val_period"] > 0 or view["sft.val_at_start"]))
    yield from _divides(view, "sft.val_global_batch_size", "sft.val_micro_batch_size")


def _divides(view: View, global_key: str, micro_key: str) -> Iterator[Violation]:
    ranks, size, micro = layout_of(view).data, view[global_key], view.get(micro_key, 1)
    view.require(size >= 1 and micro >= 1)
    if size % ranks:
        yield Violation(global_key, size, f"it must be a multiple of the {ranks} data-parallel ranks", f"write {-(-size // ranks) * ranks}")
        return
    by_tokens = view.get(f"{PACKING}.enabled", False) or view.get(f"{DYNAMIC}.enabled", False)
    if not by_tokens and (size // ranks) % micro:
        bound = f"it must divide the {size // ranks} samples ({size} / {ranks} data-parallel ranks) of a global batch on one rank"
        yield Violation(micro_key, micro, bound, f"write a divisor of {size // ranks}")


def one_way_of_batching(view: View) -> Iterator[Violation]:
    """Packing and dynamic batching exclude each other."""
    if view[f"{DYNAMIC}.enabled"] and view[f"{PACKING}.enabled"]:
        yield Violation(f"{DYNAMIC}.enabled", True, "sequence packing is enabled too", "disable one of the two")


def token_budgets_given(view: View) -> Iterator[Violation]:
    """A token budget is there where it is used, and holds the longest sequence with its padding."""
    longest = view["policy.max_total_sequence_length"]
    _, context, tensor = axis_sizes(view)
    share = sequence_share(tensor, context, view.get(sequence_parallel_key(view), False))
    for section in (PACKING, DYNAMIC):
        if not view.get(f"{section}.enabled", False):
            continue
        multiple = share
        if section == DYNAMIC:
            multiple = math.lcm(share, view["policy.make_sequence_length_divisible_by"])
        needed = -(-longest // multiple) * multiple
        for key in (f"{section}.train_mb_tokens", f"{section}.logprob_mb_tokens"):
            budget = view.get(key)
            if budget is None:
                if not view.written(key):
                    yield Violation(key, budget, f"{section} is enabled and needs it", f"write {needed} or more")
            elif budget < needed:
                padded = f", padded to a multiple of {multiple}" if needed > longest else ""
                bound = f"it must hold a sequence of policy.max_total_sequence_length = {longest} tokens{padded}"
                yield Violation(key, budget, bound, f"write {needed} or more")


BATCH_RULES: tuple[Rule, ...] = (
    samples_fill_global_batches,
    global_batch_divides,
    validation_batch_divides,
    one_way_of_batching,
    token_budgets_given,
)
