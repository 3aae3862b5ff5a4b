"""One system of planted faults: mutants of the modules below, made by operations on the syntax tree, and a
table of those made by hand.

``python -m tests.mutations`` plants them and runs the tests that have to see them; ``megarl parity --prove``
in a checkout plants, beside the faults that are shipped, those that have cases.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megarl.parity.faults import Fault
from tests.mutations.mutator import Mutant, sampled_mutants
from tests.mutations.table import TABLE, Row

MUTANTS = 20
"""How many mutants of a module are drawn."""


@dataclass(frozen=True, slots=True)
class Seen:
    """By whom mutants of a module have to be seen: by tests, or by cases of ``megarl parity``.

    Attributes:
        tests: names of files in ``tests/unit``, without ``test_`` and the suffix.
        cases: lines of cases.
        without: how the names of functions begin that these do not show: they run on a GPU, exchange what
            ranks have (the table has rows of these), or are symmetric.
    """

    tests: tuple[str, ...] = ()
    cases: tuple[str, ...] = ()
    without: tuple[str, ...] = ()


MODULES: Mapping[str, Seen] = {
    "converters.mapping.layouts": Seen(("converters_shards",)),
    "megarl.algorithms.advantages": Seen(("advantages", "value_losses", "ppo")),
    "megarl.algorithms.distillation_loss": Seen(("distillation_loss",)),
    "megarl.algorithms.loss_functions": Seen(
        ("losses", "policy_gradients", "preference_losses", "mismatch", "divergence_bandit")
    ),
    "megarl.algorithms.utils": Seen(("losses", "policy_gradients", "preference_losses", "value_losses")),
    "megarl.algorithms.value_losses": Seen(("value_losses", "rm")),
    "megarl.data.packing.algorithms": Seen(("packing", "packing_metrics")),
    "megarl.data.sampler": Seen(("sampler",)),
    "megarl.distributed.batched_data_dict": Seen(
        ("batched_data_dict", "batched_data_dict_sharding", "parcels")
    ),
    "megarl.models.engine.attention": Seen(("attention", "varlen_attention", "context")),
    "megarl.models.engine.context": Seen(
        ("context", "model_input"), without=("_GatherReplicated.", "_GatherShared.", "_all_gather")
    ),
    "megarl.models.engine.logprobs": Seen(
        ("logprobs", "output_layer", "topk"), without=("_combine", "_columns_of_all", "_kernels_for")
    ),
    "megarl.models.engine.microbatches": Seen(("model_input", "output_layer", "topk")),
    "megarl.models.engine.model_input": Seen(("model_input", "output_layer")),
    "megarl.models.engine.partial_attention": Seen(
        ("partial_attention",), without=("takes_flash", "partial_gradients")
    ),
    "megarl.models.engine.ring_attention": Seen(
        cases=(
            "backend=megatron cp=2 comm=p2p batching=packed mbs=2 micro=2 room=15 length=13",
            "backend=megatron cp=4 comm=p2p family=mistral window=4 layers=2 mbs=2 length=15",
        )
    ),
    "megarl.models.engine.topk": Seen(("topk",), without=("_gathered",)),
    "megarl.models.generation.sampling": Seen(("sampling", "logprobs")),
    "megarl.models.megatron.residual_norm": Seen(
        ("residual_norm",), without=("_compiled", "joins_norms", "join_norms", "_wide")
    ),
    "megarl.models.megatron.rotary": Seen(("rotary",), without=("by_kernel",)),
    "megarl.weight_sync.slices": Seen(("weight_slices",)),
}
"""The modules that are mutated."""
EQUIVALENT: Mapping[str, str] = {
    '"loss": loss.detach(), -> "loss": loss,': "the engine detaches metrics",
    "return masked_mean(of_pairs, pair_mask, global_normalization_factor=global_valid_seqs / 2) -> "
    "return masked_mean(pair_mask, of_pairs, global_normalization_factor=global_valid_seqs / 2)": (
        "a sum of products"
    ),
    "teacher = torch.where(counts, data[TOPK_LOGITS][:, :-1].to(scored.dtype), 0.0).detach() -> "
    "teacher = torch.where(counts, data[TOPK_LOGITS][:, :-1].to(scored.dtype), 0.0)": (
        "a batch has no gradient"
    ),
    "one, other = torch.where(can_be, one, 0.0), torch.where(can_be, other, 0.0) -> "
    "one, other = torch.where(can_be, one, 1.0), torch.where(can_be, other, 0.0)": "masked again behind it",
    "one, other = torch.where(can_be, one, 0.0), torch.where(can_be, other, 0.0) -> "
    "one, other = torch.where(can_be, one, 0.0), torch.where(can_be, other, 1.0)": "masked again behind it",
    "return torch.where(advantages < 0, torch.minimum(values, -advantages * self.ratio_clip_c), values) -> "
    "return torch.where(advantages <= 0, torch.minimum(values, -advantages * self.ratio_clip_c), values)": (
        "0 either way"
    ),
    "sixth, third, half = (bisect_right(sizes, capacity // parts) for parts in (6, 3, 2)) -> "
    "sixth, third, half = (bisect_right(sizes, capacity // parts) for parts in (7, 3, 2))": (
        "another packing, as good"
    ),
    "total, norm, scale = _compiled()[0](_rows(tokens), _rows(residual), weight, epsilon) -> "
    "total, norm, scale = _compiled()[0](_rows(residual), _rows(tokens), weight, epsilon)": "their sum",
    "for rows, values in scaled_chunks(logits, own, 1.0): -> "
    "for rows, values in scaled_chunks(logits, own, 2.0):": "the same order",
    "ordered = torch.where(bits < 0, -(2**31) - 1 - bits, bits) -> "
    "ordered = torch.where(bits < 0, -(2**31) + 1 - bits, bits)": (
        "the same order, but for the least number there is"
    ),
    "ordered = torch.where(bits < 0, -(2**31) - 1 - bits, bits) -> "
    "ordered = torch.where(bits < 0, (2**31) - 1 - bits, bits)": (
        "times 2**32, their difference is 2**64, which is 0 in int64"
    ),
    "if shard.ranks > 1 and found.numel(): -> if shard.ranks > 1:": "a sum of nothing over all ranks",
    "if window is None or window >= end - start: -> if window is None or window > end - start:": (
        "another way to the same numbers"
    ),
    "if window is None or window >= end - start: -> if window is None or window >= end:": (
        "another way to the same numbers"
    ),
}
"""Changes of mutants that nobody can see, and why."""


def mutants(module: str, seed: int) -> dict[str, Mutant]:
    """Return the drawn mutants of a module by name, without those that nobody can see, or not where they are
    looked for.

    Args:
        module: one of ``MODULES``.
        seed: of the sample.
    """
    excused = MODULES[module].without
    return {
        f"{module}:{number}": mutant
        for number, mutant in sampled_mutants(module, MUTANTS, seed).items()
        if mutant.change not in EQUIVALENT and not (excused and mutant.place.startswith(excused))
    }


def fault_of(row: Row) -> Fault:
    """A row of the table, whose file is a module, as a fault that can be planted in memory."""
    return Fault(row.file.removesuffix(".py").replace("/", "."), row.old, row.new, row.cases)


def parity_faults(seed: int) -> dict[str, Fault]:
    """Return the faults that cases of ``megarl parity`` have to show, by name: rows of the table, and drawn
    mutants."""
    rows = {name: fault_of(row) for name, row in TABLE.items() if row.cases}
    drawn = {
        name: Fault(module, *mutant.text, seen.cases)
        for module, seen in MODULES.items()
        if seen.cases
        for name, mutant in mutants(module, seed).items()
    }
    return rows | drawn
