"""Compare the measurements of all ranks with the reference.

Bounds are relative: a constant in float32, and measured in 16 bit (``megarl.parity.noise``). An error is
relative to a scale. For a log-probability: its magnitude, at least 1. For a loss or metric: the sum of its
rows' contributions, because cancelling terms leave no more accurate sum, or the effect of such an error of
the log-probabilities (``Expected.scales``). For a weight: the norm of its tensor. For a gradient norm: the
norm, or the size of terms that cancel in it (``Expected.norm_scales``).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import starmap, zip_longest
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megarl.algorithms.train_results import step_metrics
from megarl.config.policy import PolicyConfig
from megarl.models.policy.batch_plan import ShardedBatch
from megarl.observe.metrics import reduce_metrics
from megarl.parity.batches import logprob_shards
from megarl.parity.case import Case
from megarl.parity.errors import BOUND, relative_error, root_mean_square, tensor_error, token_errors
from megarl.parity.jobs import Share
from megarl.parity.losses import make_loss
from megarl.parity.noise import LIKELIEST, LIKELIEST_AFTER, LOGPROBS, LOGPROBS_AFTER, MEAN, WEIGHT, Bounds
from megarl.parity.reference import Expected

if TYPE_CHECKING:
    from megarl.models.engine.passing import WorkerTrainResult


@dataclass(frozen=True, slots=True)
class Difference:
    """Deviation of a quantity from its expected value.

    Attributes:
        what: the quantity, such as ``call 1 grad_norm``.
        kind: its class: ``logprobs``, ``loss``, ``metric``, ``grad_norm``, ``weights``.
        error: relative error; infinite if a number is missing or NaN.
        bound: maximum error.
        found, expected: the numbers as text.
    """

    what: str
    kind: str
    error: float
    bound: float
    found: str
    expected: str

    @property
    def passes(self) -> bool:
        """True if the error is within the bound."""
        return self.error <= self.bound

    def __str__(self) -> str:
        return (
            f"{self.what}: {self.found}, expected {self.expected} (relative error {self.error:.1e}, "
            f"bound {self.bound:.0e})"
        )


def compare(
    case: Case,
    config: PolicyConfig,
    batch: Mapping[str, Tensor],
    shares: Sequence[Share],
    logprobs: Tensor,
    expected: Expected,
    bounds: Bounds,
) -> list[Difference]:
    """Return the deviations of all quantities of a case from the reference.

    Args:
        case: the case.
        config: its policy configuration.
        batch: its batch.
        shares: measurements of all ranks.
        logprobs: log-probabilities [B, S] of the reference before training.
        expected: results of training the reference.
        bounds: maximum errors.
    """
    first_shares = _first_shares(shares)
    by_data_rank = [first_shares[rank] for rank in range(case.dp)]
    dealt, wanted = logprob_shards(case, config, batch), logprobs[: case.logprob_rows]
    found = _restored(LOGPROBS, dealt, [share.logprobs for share in by_data_rank], wanted, bounds)
    after = [share.logprobs_after for share in by_data_rank]
    found += _restored(LOGPROBS_AFTER, dealt, after, expected.logprobs[: case.logprob_rows], bounds)
    rows = slice(case.logprob_rows)
    masked = (batch["token_mask"][rows] == 0) | (batch["sample_mask"][rows, None] == 0)
    # Fast paths skip masked positions, which stay 0. Models with a score layer have no such path.
    skips = case.is_fast and not case.scores
    for number, (what, complete) in enumerate(
        ((LOGPROBS, logprobs), (LOGPROBS_AFTER, expected.logprobs)) if skips else ()
    ):
        parts = [share.under_mask[number] for share in by_data_rank]
        found += _restored(
            what, dealt, parts, complete[rows].masked_fill(masked, 0.0), bounds, note=" under the mask"
        )
    # Without adapters, the reference policy is the model before training.
    base = wanted if expected.base_logprobs is None else expected.base_logprobs[rows]
    for number, when in enumerate(("before", "after")) if case.reference else ():
        again = [share.reference_logprobs[number] for share in by_data_rank]
        found += _restored(f"reference log-probabilities {when} training", dealt, again, base, bounds)
    for number, what in enumerate((LIKELIEST, LIKELIEST_AFTER)) if case.likeliest else ():
        tops = [share.likeliest[number] for share in by_data_rank]
        found += _likeliest(case, what, dealt, tops, batch, expected.distributions[number][rows], bounds)
    found += starmap(_repeated, enumerate(shares))
    if case.evaluate:
        for rank, share in enumerate(by_data_rank):
            found.append(_evaluation(rank, share.evaluation, expected, bounds))
    for call in range(len(expected.losses)):
        found += _call(case, call, [share.calls[call] for share in by_data_rank], expected, bounds)
    found += _replicas(shares)
    for rank, share in enumerate(shares):
        found += _weights(rank, share.weights, expected.weights, bounds)
    return found


def _number(
    what: str, kind: str, found: float, expected: float, bound: float, scale: float = 0.0
) -> Difference:
    return Difference(
        what, kind, relative_error(found, expected, scale), bound, f"{found:.9g}", f"{expected:.9g}"
    )


def _repeated(rank: int, share: Share) -> Difference:
    """Check that computing the reference policy's log-probabilities does not change the policy's."""
    told = "the same" if share.repeated else "others"
    what = f"rank {rank} log-probabilities after those of the reference policy"
    return Difference(
        what, "logprobs", 0.0 if share.repeated else math.inf, BOUND, told, "the same, to the bit"
    )


def _likeliest(
    case: Case,
    what: str,
    dealt: ShardedBatch,
    parts: Sequence[Mapping[str, Tensor]],
    batch: Mapping[str, Tensor],
    distributions: Tensor,
    bounds: Bounds,
) -> Iterator[Difference]:
    """Yield the deviations of the most likely tokens. Their log-probabilities must be the largest, and belong
    to the reported tokens. Tokens with equal probabilities up to rounding may be in either order, but none
    may be reported twice."""
    logits = dealt.restore([part["topk_logits"] for part in parts])
    tokens = dealt.restore([part["topk_indices"] for part in parts])
    follows = torch.arange(1, case.length + 1)[None] < batch["input_lengths"][: len(logits), None]
    if case.is_fast:
        wanted = (batch["token_mask"] != 0) & (batch["sample_mask"][:, None] != 0)
        # The mask of the predicted token, which is one position later, decides.
        follows = follows & torch.nn.functional.pad(wanted[: len(logits), 1:], (0, 1))
    nothing = torch.zeros_like(logits)
    # The last position predicts nothing, so the reference has no distribution there.
    logarithms = torch.nn.functional.pad(distributions, (0, 0, 0, 1))
    largest = logarithms.topk(case.likeliest).values.where(follows[..., None], nothing)
    # An id outside of the vocabulary would make gather fail. Clamp it and compare with 0, which reports it.
    inside = (tokens >= 0) & (tokens < case.vocab)
    of_tokens = logarithms.gather(2, tokens.clamp(0, case.vocab - 1)).where(
        follows[..., None] & inside, nothing
    )
    for name, other in (("", largest), (", of their tokens", of_tokens)):
        yield _logprobs(what + name, logits.flatten(1), other.flatten(1), bounds.of(what))
    twice = (tokens.sort(dim=2).values.diff(dim=2) == 0).any(2) & follows
    yield Difference(
        f"{what}, each once",
        "logprobs",
        math.inf if bool(twice.any()) else 0.0,
        BOUND,
        "some twice",
        "each once",
    )


def _restored(
    what: str, dealt: ShardedBatch, parts: Sequence[Tensor], expected: Tensor, bounds: Bounds, note: str = ""
) -> list[Difference]:
    """Return the deviations of all ranks' log-probabilities in the order of the batch: the worst token's, and
    the root mean square."""
    given, asked = list(map(len, parts)), [shard.size for shard in dealt.shards]
    if given != asked:
        return [
            Difference(
                what, "logprobs", math.inf, bounds.of(LOGPROBS), f"{given} rows from the replicas", f"{asked}"
            )
        ]
    # The other kinds, such as the reference policy's, belong to the weights before training.
    like = LOGPROBS_AFTER if what == LOGPROBS_AFTER else LOGPROBS
    what += note
    found = dealt.restore(parts)
    worst = _logprobs(what, found, expected, bounds.of(like))
    if found.shape != expected.shape:
        return [worst]
    # Column 0 and padding are 0 by definition, and would only lower the mean.
    error, bound = root_mean_square(token_errors(found, expected)[expected != 0]), bounds.of(like + MEAN)
    means = f"mean {float(found.mean()):.9g}", f"mean {float(expected.mean()):.9g}"
    return [worst, Difference(f"{what}, root mean square", "logprobs", error, bound, *means)]


def _logprobs(what: str, found: Tensor, expected: Tensor, bound: float) -> Difference:
    """Return the deviation of the worst token."""
    if found.shape != expected.shape:
        return Difference(
            what, "logprobs", math.inf, bound, f"shape {list(found.shape)}", f"shape {list(expected.shape)}"
        )
    error = token_errors(found, expected)
    if error.numel() == 0:
        return Difference(what, "logprobs", 0.0, bound, "nothing", "nothing")
    row, column = divmod(int(error.argmax()), error.shape[1])
    place = f"at row {row}, token {column}"
    given, asked = f"{float(found[row, column]):.9g} {place}", f"{float(expected[row, column]):.9g} {place}"
    return Difference(what, "logprobs", float(error.max()), bound, given, asked)


def _evaluation(
    rank: int, answer: WorkerTrainResult | None, expected: Expected, bounds: Bounds
) -> Difference:
    loss = _losses(answer)[0] if answer else math.nan
    target, scale, bound = expected.losses[0][0], expected.scales[0]["loss"], bounds.of("call 0 loss 0")
    return _number(f"evaluation loss of replica {rank}", "loss", loss, target, bound, scale)


def _losses(answer: WorkerTrainResult) -> list[float]:
    return list(map(float, answer["global_loss"]))


def _call(
    case: Case, call: int, answers: Sequence[WorkerTrainResult], expected: Expected, bounds: Bounds
) -> list[Difference]:
    """Return the deviations of a ``train()`` call: losses, gradient norms, and metrics, reduced as on the
    driver."""
    metrics: dict[str, list[float]] = {}
    for answer in answers:
        for name, values in answer["all_mb_metrics"].items():
            metrics.setdefault(name, []).extend(values)
    loss_fn = make_loss(case)
    first = answers[0]
    reduced = step_metrics(
        {"loss": first["global_loss"], "grad_norm": first["grad_norm"], "all_mb_metrics": metrics}, loss_fn
    )
    raw = reduce_metrics(metrics, loss_fn.metric_reductions)
    wanted, scales = expected.metrics[call], expected.scales[call]
    norms, norm_scales = expected.norms[call], expected.norm_scales[call]

    def one(
        name: str, kind: str, value: float, target: float, scale: float = 0.0, like: str | None = None
    ) -> Difference:
        bound = bounds.of(f"call {call} {like or name}")
        return _number(f"call {call} {name}", kind, value, target, bound, scale)

    found: list[Difference] = []
    both = zip_longest(_losses(first), expected.losses[call], fillvalue=math.nan)
    for index, (loss, target) in enumerate(both):
        found.append(one(f"loss {index}", "loss", loss, target, scales["loss"]))
    mean_norm, mean_scale = sum(norms) / len(norms), sum(norm_scales) / len(norms)
    # ``train()`` reports the gradient norm of its last global batch.
    last = first["grad_norm"]
    assert isinstance(last, Tensor)
    found += [
        one("grad_norm", "grad_norm", float(last), norms[-1], norm_scales[-1]),
        one("mean grad_norm", "grad_norm", reduced.pop("grad_norm"), mean_norm, mean_scale, like="grad_norm"),
    ]
    for index, norm in enumerate(_per_batch(metrics, norms)):
        found.append(
            one(f"grad_norm of global batch {index}", "grad_norm", norm, norms[index], norm_scales[index])
        )
    found += [
        one("sum of micro-batch losses", "metric", raw["loss"], wanted["loss"], scales["loss"], like="loss")
    ]
    # Compare the union of both sides: a missing metric becomes NaN, which exceeds every bound.
    for name in sorted({*reduced, *wanted} - {"grad_norm"}):
        found.append(
            one(
                name, "metric", reduced.get(name, math.nan), wanted.get(name, math.nan), scales.get(name, 0.0)
            )
        )
    return found


def _per_batch(metrics: Mapping[str, list[float]], norms: Sequence[float]) -> list[float]:
    """Return the gradient norms that the first data-parallel rank reported, one per global batch."""
    reported = metrics.get("grad_norm", [])[: len(norms)]
    return [*reported, *[math.nan] * (len(norms) - len(reported))]


def _first_shares(shares: Sequence[Share]) -> dict[int, Share]:
    """Return the share of the first rank of each data-parallel rank."""
    # Reverse the order, so that the first rank of each data rank is the one that stays in the mapping.
    return {share.data_rank: share for share in reversed(shares)}


def _replicas(shares: Sequence[Share]) -> list[Difference]:
    """Check that ranks with the same rows have exactly the same results, and that all ranks report the same
    loss."""
    first = _first_shares(shares)
    found = []
    for rank, share in enumerate(shares):
        twin = first[share.data_rank]
        found.append(
            _logprobs(
                f"rank {rank} log-probabilities against its data-parallel rank's first",
                share.logprobs,
                twin.logprobs,
                BOUND,
            )
        )
        for call, answer in enumerate(share.calls):
            for index, (loss, other) in enumerate(
                zip_longest(_losses(answer), _losses(shares[0].calls[call]), fillvalue=math.nan)
            ):
                found.append(
                    _number(
                        f"rank {rank} call {call} loss {index} against rank 0's", "loss", loss, other, BOUND
                    )
                )
            if answer["all_mb_metrics"] != twin.calls[call]["all_mb_metrics"]:
                found.append(
                    Difference(
                        f"rank {rank} call {call} metrics",
                        "metric",
                        math.inf,
                        BOUND,
                        "others",
                        "those of its data-parallel rank's first",
                    )
                )
    return found


def _weights(
    rank: int, found: Mapping[str, Tensor], expected: Mapping[str, Tensor], bounds: Bounds
) -> list[Difference]:
    differences = []
    for name in sorted({*found, *expected}):
        what, bound = f"rank {rank} weight {name}", bounds.of(WEIGHT + name)
        if name not in found or name not in expected:
            given = ("there", "absent") if name in found else ("absent", "there")
            differences.append(Difference(what, "weights", math.inf, bound, *given))
            continue
        error = tensor_error(found[name], expected[name])
        norm, expected_norm = float(found[name].float().norm()), float(expected[name].float().norm())
        norms = f"norm {norm:.9g}", f"norm {expected_norm:.9g}"
        differences.append(Difference(what, "weights", error, bound, *norms))
    return differences
