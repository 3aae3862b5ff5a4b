"""Whether what the ranks measured is what the reference expects.

In float32 every bound is :data:`BOUND`, relative. What a number is relative to: a log-probability to itself or 1; a loss or a metric to
what its rows contribute, because terms that cancel leave no better sum, or to what such an error of the log-probabilities makes of it
(``Expected.scales``); a weight to the norm of its tensor; a gradient norm to itself.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest

import torch

from megarl.algorithms.train_results import step_metrics
from megarl.models.policy.batch_plan import ShardedBatch
from megarl.observe.metrics import reduce_metrics
from megarl.parity.batches import logprob_shards
from megarl.parity.case import Case
from megarl.parity.jobs import Share
from megarl.parity.losses import make_loss
from megarl.parity.reference import Expected

BOUND = 1e-5


@dataclass(frozen=True, slots=True)
class Difference:
    """How far one quantity is from what it should be.

    Attributes:
        what: the quantity, for example ``step 1 grad_norm``.
        kind: its class, for summaries: ``logprobs``, ``loss``, ``metric``, ``grad_norm``, ``weights``.
        error: relative error; infinite where a number is missing or not one.
        bound: the largest error that passes.
        found, expected: the numbers, in words.
    """

    what: str
    kind: str
    error: float
    bound: float
    found: str
    expected: str

    @property
    def passes(self) -> bool:
        """Whether the error is within its bound."""
        return self.error <= self.bound

    def __str__(self) -> str:
        return f"{self.what}: {self.found}, expected {self.expected} (relative error {self.error:.1e}, bound {self.bound:.0e})"


def compare(
    case: Case,
    config: Mapping[str, object],
    batch: Mapping[str, torch.Tensor],
    shares: Sequence[Share],
    logprobs: torch.Tensor,
    expected: Expected,
) -> list[Difference]:
    """Every quantity of a case, measured against the reference.

    Args:
        case: the case.
        config: its policy configuration.
        batch: its whole batch.
        shares: of all ranks.
        logprobs: [B, S] of the reference before training.
        expected: what the reference got by training.
    """
    by_data_rank = [next(share for share in shares if share.data_rank == rank) for rank in range(case.dp)]
    dealt, wanted = logprob_shards(case, config, batch), logprobs[: case.logprob_rows]
    found = [_restored("log-probabilities", dealt, [share.logprobs for share in by_data_rank], wanted)]
    if case.reference:
        again = [share.reference_logprobs for share in by_data_rank if share.reference_logprobs is not None]
        found.append(_restored("reference log-probabilities after training", dealt, again, wanted))
    if case.evaluate:
        found += _evaluation([share.evaluation for share in by_data_rank], expected)
    for call in range(len(expected.losses)):
        found += _call(case, call, [share.calls[call] for share in by_data_rank], expected)
    found += _replicas(shares)
    for rank, share in enumerate(shares):
        found += _weights(rank, share.weights, expected.weights)
    return found


def relative_error(found: float, expected: float, scale: float = 0.0) -> float:
    """``|found - expected|`` by the larger of ``|expected|`` and ``scale``; 0 for equal numbers, also infinities, infinite for what is no
    number."""
    if found == expected:
        return 0.0
    size = max(abs(expected), scale)
    if not (math.isfinite(found) and math.isfinite(expected)) or size == 0:
        return math.inf
    return abs(found - expected) / size


def _number(what: str, kind: str, found: float, expected: float, scale: float = 0.0) -> Difference:
    return Difference(what, kind, relative_error(found, expected, scale), BOUND, f"{found:.9g}", f"{expected:.9g}")


def _restored(what: str, dealt: ShardedBatch, parts: Sequence[torch.Tensor], expected: torch.Tensor) -> Difference:
    """What the data-parallel ranks gave for their rows, in the order of the batch."""
    given, asked = [len(part) for part in parts], [shard.size for shard in dealt.shards]
    if given != asked:
        return Difference(what, "logprobs", math.inf, BOUND, f"{given} rows from the replicas", f"{asked}")
    return _logprobs(what, dealt.restore(parts), expected)


def _logprobs(what: str, found: torch.Tensor, expected: torch.Tensor) -> Difference:
    """The worst of all tokens; where the reference is exactly 0 (column 0, padding) nothing else will do."""
    if found.shape != expected.shape:
        return Difference(what, "logprobs", math.inf, BOUND, f"shape {list(found.shape)}", f"shape {list(expected.shape)}")
    error = (found - expected).abs() / expected.abs().clamp(min=1.0)
    error = torch.where((expected == 0) & (found != 0), math.inf, error).nan_to_num(nan=math.inf, posinf=math.inf)
    if error.numel() == 0:
        return Difference(what, "logprobs", 0.0, BOUND, "nothing", "nothing")
    row, column = divmod(int(error.argmax()), error.shape[1])
    numbers = (f"{float(tensor[row, column]):.9g} at row {row}, token {column}" for tensor in (found, expected))
    return Difference(what, "logprobs", float(error.max()), BOUND, *numbers)


def _evaluation(answers: Sequence[Mapping[str, object] | None], expected: Expected) -> list[Difference]:
    scale = expected.scales[0]["loss"]
    return [
        _number(f"evaluation loss of replica {rank}", "loss", _losses(answer)[0] if answer else math.nan, expected.losses[0][0], scale)
        for rank, answer in enumerate(answers)
    ]


def _losses(answer: Mapping[str, object]) -> list[float]:
    losses = answer["global_loss"]
    assert isinstance(losses, torch.Tensor)
    return [float(loss) for loss in losses]


def _call(case: Case, call: int, answers: Sequence[Mapping[str, object]], expected: Expected) -> list[Difference]:
    """One ``train()`` call: its losses and gradient norms, and all metrics reduced as the driver reduces them."""
    metrics: dict[str, list[float]] = {}
    for answer in answers:
        reported = answer["all_mb_metrics"]
        assert isinstance(reported, Mapping)
        for name, values in reported.items():
            metrics.setdefault(name, []).extend(values)
    loss_fn = make_loss(case)
    first = answers[0]
    reduced = step_metrics({"loss": first["global_loss"], "grad_norm": first["grad_norm"], "all_mb_metrics": metrics}, loss_fn)
    raw = reduce_metrics(metrics, loss_fn.metric_reductions)
    wanted, scales, norms = expected.metrics[call], expected.scales[call], expected.norms[call]
    what = f"call {call} "
    found = [
        _number(f"{what}loss {index}", "loss", loss, target, scales["loss"])
        for index, (loss, target) in enumerate(zip_longest(_losses(first), expected.losses[call], fillvalue=math.nan))
    ]
    found += [_number(f"{what}grad_norm", "grad_norm", reduced.pop("grad_norm"), norms[-1])]
    found += [
        _number(f"{what}grad_norm of global batch {index}", "grad_norm", value, norms[index])
        for index, value in enumerate(_per_batch(metrics, norms))
    ]
    found += [_number(f"{what}sum of micro-batch losses", "metric", raw["loss"], wanted["loss"], scales["loss"])]
    names = {*reduced, *wanted} - {"grad_norm"}
    for name in sorted(names):
        found.append(_number(f"{what}{name}", "metric", reduced.get(name, math.nan), wanted.get(name, math.nan), scales.get(name, 0.0)))
    return found


def _per_batch(metrics: Mapping[str, list[float]], norms: Sequence[float]) -> list[float]:
    """The gradient norms that the first replica reported; one for each global batch."""
    reported = metrics.get("grad_norm", [])[: len(norms)]
    return [*reported, *[math.nan] * (len(norms) - len(reported))]


def _replicas(shares: Sequence[Share]) -> list[Difference]:
    """Ranks that hold the same rows answer the same, and all report the same loss."""
    first = {share.data_rank: share for share in reversed(shares)}
    found = []
    for rank, share in enumerate(shares):
        twin = first[share.data_rank]
        found.append(_logprobs(f"rank {rank} log-probabilities against its data-parallel rank's first", share.logprobs, twin.logprobs))
        for call, answer in enumerate(share.calls):
            for index, (loss, other) in enumerate(zip_longest(_losses(answer), _losses(shares[0].calls[call]), fillvalue=math.nan)):
                found.append(_number(f"rank {rank} call {call} loss {index} against rank 0's", "loss", loss, other))
            if answer["all_mb_metrics"] != twin.calls[call]["all_mb_metrics"]:
                found.append(
                    Difference(
                        f"rank {rank} call {call} metrics", "metric", math.inf, BOUND, "others", "those of its data-parallel rank's first"
                    )
                )
    return found


def _weights(rank: int, found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> list[Difference]:
    differences = []
    for name in sorted({*found, *expected}):
        what = f"rank {rank} weight {name}"
        if name not in found or name not in expected:
            given = ("there" if name in names else "absent" for names in (found, expected))
            differences.append(Difference(what, "weights", math.inf, BOUND, *given))
            continue
        difference, size = float((found[name].float() - expected[name].float()).norm()), float(expected[name].float().norm())
        error = difference / size if math.isfinite(difference) and size else math.inf if difference else 0.0
        differences.append(Difference(what, "weights", error, BOUND, f"norm {float(found[name].norm()):.9g}", f"norm {size:.9g}"))
    return differences
