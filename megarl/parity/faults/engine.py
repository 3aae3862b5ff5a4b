"""Known faults of what all backends share: sums over ranks, masks, attention, packing, context parallelism, temperature, metrics."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

from megarl.config.arithmetic import padded_vocabulary
from megarl.observe.metrics import Reduction
from megarl.parity.batches import token_batch
from megarl.parity.case import Case
from megarl.parity.faults.losses import has_entropies
from megarl.parity.faults.patching import Mutation, Patch, after_building, many_tokens, replacing, replacing_for, sees_tokens
from megarl.parity.faults.scoring import compares_scores

ENGINE = "megarl.models.engine"


class _ScaledGradient(torch.autograd.Function):
    """Identity with a gradient ``factor`` times as large."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient * ctx.factor, None


def _scale_gradient(factor: Any) -> Patch:
    """Gradients are ``factor(case)`` times as large as they should be; the reported loss stays right."""

    def make(original: Any, case: Case) -> Any:
        def call(self: Any, answered: torch.Tensor, given: Any, request: Any = None) -> Any:
            output = original(self, answered, given, request)
            return replace(output, loss=_ScaledGradient.apply(output.loss, factor(case)))  # type: ignore[no-untyped-call]

        return call

    return replacing_for(f"{ENGINE}.heads:LossHead", "__call__", make)


def _left_out_where(local: Any) -> Patch:
    """The all-reduce over data-parallel ranks is left out for values of which ``local`` holds."""
    return replacing(
        f"{ENGINE}.groups:ParallelGroups",
        "sum_over_data",
        lambda original: lambda self, values: values if local(values) else original(self, values),
    )


def _chosen_rows_first(original: Any) -> Any:
    def deal(self: Any, shards: int, batch_size: int | None = None, *rest: Any, **options: Any) -> Any:
        if batch_size is None:
            return original(self, shards, batch_size, *rest, **options)
        starts = range(0, self.size, batch_size)
        order = [row for start in starts for first in (start, start + 1) for row in range(first, start + batch_size, 2)]
        return original(self.select_indices(order), shards, batch_size, *rest, **options)

    return deal


def _padded_columns_count(worker: Any, case: Case) -> None:
    worker.backend.vocabulary = replace(worker.backend.vocabulary, size=padded_vocabulary(case.vocab, case.tp))


def _gradients_pile_up(worker: Any, case: Case) -> None:
    worker.backend.zero_grad = lambda: None


def _schedule_stands_still(worker: Any, case: Case) -> None:
    worker.backend.lr_step = lambda: None


def _entropies_without_temperature(original: Any) -> Any:
    def score(logits: Any, targets: Any, shard: Any, sampling: Any, *, with_entropies: bool = False) -> Any:
        values, sums = original(logits, targets, shard, sampling, with_entropies=with_entropies)
        if with_entropies:
            _, untempered = original(logits, targets, shard, replace(sampling, temperature=1.0), with_entropies=True)
            sums = replace(sums, entropies=untempered.entropies)
        return values, sums

    return score


def _moment_of_own_columns(original: Any) -> Any:
    def combine(statistics: torch.Tensor, shard: Any) -> tuple[torch.Tensor, ...]:
        return *original(statistics, shard)[:3], *statistics[3:]

    return combine


def _future_is_seen(original: Any) -> Any:
    def see(query: Any, key: Any, value: Any, scale: float | None = None, *others: Any, **options: Any) -> torch.Tensor:
        grouped = query.shape[1] != key.shape[1]
        mixed: torch.Tensor = torch.nn.functional.scaled_dot_product_attention(query, key, value, scale=scale, enable_gqa=grouped)
        return mixed

    return see


def _forget_window(stack: contextlib.ExitStack, case: Case) -> None:
    """No query has a window, nor in a ring of context-parallel ranks, which attends by itself."""

    def forgetful(original: Any) -> Any:
        return lambda query, key, value, scale=None, window=None, *others: original(query, key, value, scale, None, *others)

    def forgetful_ring(original: Any) -> Any:
        return lambda starts, context, source, window, device: original(starts, context, source, None, device)

    replacing(f"{ENGINE}.attention", "causal_attention", forgetful)(stack, case)
    replacing(f"{ENGINE}.ring_attention", "_pieces", forgetful_ring)(stack, case)


def _drawn_otherwise(**changes: Any) -> Callable[[Any], Any]:
    """Makes a pass score tokens as if they had been drawn in another way."""
    return lambda original: lambda *arguments, sampling, **options: original(*arguments, sampling=replace(sampling, **changes), **options)


def _own_gradient_only(original: Any) -> Any:
    """Each rank keeps the gradient of its own queries' use of its keys and values, and forgets what the others send."""

    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (order,) = ctx.saved_tensors
        by_rank = torch.empty_like(gradient)
        by_rank[order] = gradient
        size, rank = torch.distributed.get_world_size(ctx.group), torch.distributed.get_rank(ctx.group)
        return by_rank.chunk(size)[rank].contiguous(), None, None

    return staticmethod(backward)


def _last_part_alone(original: Any) -> Any:
    def join(output: torch.Tensor, logsumexp: torch.Tensor, part: torch.Tensor, part_sum: torch.Tensor) -> None:
        output.copy_(part)
        logsumexp.copy_(part_sum)

    return join


def _targets_not_shifted(original: Any) -> Any:
    return lambda *arguments: [replace(laid, targets=laid.tokens) for laid in original(*arguments)]


def _extremes_are_summed(original: Any) -> Any:
    def averaged(metrics: Any, loss_fn: Any, count: int) -> Any:
        declared = loss_fn.metric_reductions
        return {
            name: [sum(values)] if declared.get(name) in (Reduction.MIN, Reduction.MAX) and len(values) > 1 else values
            for name, values in original(metrics, loss_fn, count).items()
        }

    return averaged


def _masked_samples_count(original: Any) -> Any:
    return lambda data, groups: original({**data, "sample_mask": torch.ones_like(data["sample_mask"])}, groups)


def _all_but_the_last(original: Any) -> Any:
    return lambda self, shapes: original(self, shapes)[:-1] or original(self, shapes)


def _window_hides_something(case: Case) -> bool:
    """Some trained token is predicted by one that does not see the first of its sequence."""
    batch = token_batch(case)
    trained = batch["token_mask"] * batch["sample_mask"][:, None]
    return case.window > 0 and bool(trained[:, case.window + 1 :].any())


def _over_data(case: Case) -> bool:
    return case.dp > 1 and sees_tokens(case)


def _over_context(case: Case) -> bool:
    return case.cp > 1 and sees_tokens(case)


def _over_fixed_micro_batches(case: Case) -> bool:
    return case.batching == "fixed" and case.micro > 1 and sees_tokens(case)


def _packs_many(case: Case) -> bool:
    return case.batching == "packed" and case.cp == 1 and case.room >= 3 * case.length and case.global_batch >= 8 * case.dp


def _has_ratios(case: Case) -> bool:
    return case.loss_kind == "pg" and not {"noratio", "forced"} & case.loss_options


def _stays_in(original: Any) -> Any:
    @contextlib.contextmanager
    def swapped_in(self: Any, backend: Any) -> Iterator[None]:
        with original(self, backend):
            yield
            left = [parameter.detach().clone() for _, parameter in backend.parameters()]
        for (_, parameter), weight in zip(backend.parameters(), left, strict=True):
            with torch.no_grad():
                parameter.copy_(weight)

    return swapped_in


def _never_comes_in(original: Any) -> Any:
    return lambda self, backend: contextlib.nullcontext()


def _was_trained(case: Case) -> bool:
    return case.reference and sees_tokens(case) and case.loss_kind != "pg"


FAULTS: dict[str, Mutation] = {
    "reference-stays": Mutation(
        "the weights of the reference policy stay after its turn",
        _was_trained,
        replacing(f"{ENGINE}.offload_state:ReferenceWeights", "swapped_in", _stays_in),
        "reference=1 loss=nll",
    ),
    "reference-is-the-policy": Mutation(
        "the reference policy's log-probabilities are the policy's",
        _was_trained,
        replacing(f"{ENGINE}.offload_state:ReferenceWeights", "swapped_in", _never_comes_in),
        "reference=1 loss=nll",
    ),
    "loss-not-summed-over-data": Mutation(
        "the all-reduce of the reported loss over data-parallel ranks is left out",
        _over_data,
        _left_out_where(lambda v: v.ndim == 0),
        "dp=2",
    ),
    "normalizers-local": Mutation(
        "every data-parallel rank divides by its own number of tokens", _over_data, _left_out_where(lambda v: v.ndim == 1), "dp=2"
    ),
    "masked-samples-count": Mutation(
        "samples that are masked out count in the divisor",
        lambda case: case.masked in ("some", "rank") and case.length >= 5 and case.global_batch >= 4,
        replacing(f"{ENGINE}.step", "global_normalizers", _masked_samples_count),
        "masked=some",
    ),
    "gradient-times-data": Mutation(
        "gradients are summed twice over data-parallel ranks", _over_data, _scale_gradient(lambda case: case.dp), "dp=2"
    ),
    "gradient-averaged-over-data": Mutation(
        "gradients are averaged over data-parallel ranks, not summed", _over_data, _scale_gradient(lambda case: 1 / case.dp), "dp=2"
    ),
    "gradient-times-context": Mutation(
        "gradients are counted once for every context-parallel rank", _over_context, _scale_gradient(lambda case: case.cp), "cp=2"
    ),
    "gradient-averaged-over-micro-batches": Mutation(
        "gradients are averaged over micro-batches, not summed",
        _over_fixed_micro_batches,
        _scale_gradient(lambda case: 1 / case.micro),
        "micro=2 batching=fixed",
    ),
    "gradients-pile-up": Mutation(
        "gradients of the step before are not cleared",
        # those of float16 were divided by the loss scale in place: beside the next ones they are nothing
        lambda case: sees_tokens(case) and case.precision != "float16",
        after_building(_gradients_pile_up),
    ),
    "schedule-stands-still": Mutation(
        "the learning-rate schedule does not advance",
        lambda case: case.warmup and not case.together,
        after_building(_schedule_stands_still),
        "warmup=1 together=0",
    ),
    "last-micro-batch-dropped": Mutation(
        "the last micro-batch of a rank is left out",
        lambda case: _over_fixed_micro_batches(case) and case.masked == "none",
        replacing(f"{ENGINE}.batching:_FixedChunk", "micro_batches", _all_but_the_last),
        # fast paths know which positions of each micro-batch they want, and fail
        "micro=2 batching=fixed paths=plain",
    ),
    "pairs-dealt-apart": Mutation(
        "the rows of a pair go to different data-parallel ranks and micro-batches, and others are compared",
        lambda case: case.dp > 1 and (many_tokens(case) if case.loss_kind == "dpo" else compares_scores(case)),
        replacing("megarl.distributed.batched_data_dict:BatchedDataDict", "deal", _chosen_rows_first),
        ("loss=dpo dp=2 masked=none", "loss=rm dp=2 masked=none"),
    ),
    "pad-columns-in-softmax": Mutation(
        "the columns that pad the vocabulary take part in the softmax",
        lambda case: case.vocab % case.tp != 0 and not case.filters and not case.scores,
        after_building(_padded_columns_count),
        "tp=2",
    ),
    "vocabulary-shards-not-combined": Mutation(
        "each tensor-parallel rank normalises over its own part of the vocabulary",
        lambda case: case.tp > 1 and not case.scores,
        replacing(
            f"{ENGINE}.logprobs", "_combine", lambda original: lambda statistics, shard: original(statistics, replace(shard, group=None))
        ),
        "tp=2",
    ),
    "entropy-of-own-vocabulary": Mutation(
        "the sum over the vocabulary in the entropy is that of a tensor-parallel rank's own part",
        lambda case: case.tp > 1 and has_entropies(case),
        replacing(f"{ENGINE}.logprobs", "_combine", _moment_of_own_columns),
        "loss=pg+entropy tp=2 masked=none",
    ),
    "entropy-of-the-model-itself": Mutation(
        "entropies are those of the model, not of what its temperature makes of it",
        # an output layer that computes in chunks has the function under a name of its own
        lambda case: case.temperature != 1.0 and case.chunk == 0 and has_entropies(case),
        replacing(f"{ENGINE}.logprobs", "score", _entropies_without_temperature),
        "loss=pg+entropy temperature=0.7 masked=none",
    ),
    "attention-leaks": Mutation(
        "packed sequences see those in front of them",
        _packs_many,
        replacing(f"{ENGINE}.attention", "_pieces", lambda original: lambda starts, share: original((0, starts[-1]), share)),
        # fast paths compute sequence by sequence
        "batching=packed paths=plain",
    ),
    "attention-sees-the-future": Mutation(
        "the attention is not causal",
        lambda case: case.cp == 1 and case.length >= 5,
        replacing(f"{ENGINE}.attention", "causal_attention", _future_is_seen),
        "paths=plain",
    ),
    "window-ignored": Mutation(
        "the sliding window is forgotten",
        _window_hides_something,
        _forget_window,
        "family=mistral paths=plain",
    ),
    "targets-not-shifted": Mutation(
        "the model is scored on the token it has just read",
        lambda case: case.length >= 5 and not case.scores,
        replacing(f"{ENGINE}.step", "lay_out_all", _targets_not_shifted),
    ),
    "context-parts-in-rank-order": Mutation(
        "parts of context-parallel ranks are joined in the order of the ranks, not of the tokens",
        lambda case: case.cp > 1 and case.length >= 5,
        replacing(
            f"{ENGINE}.context:ContextShare",
            "order",
            lambda original: lambda self, starts, device=None: torch.arange(starts[-1], device=device),
        ),
        "cp=2",
    ),
    "key-value-gradients-local": Mutation(
        "gradients of keys and values stay on the context-parallel rank that used them",
        lambda case: case.cp > 1 and case.comm == "all_gather" and many_tokens(case),
        replacing(f"{ENGINE}.context:_GatherShared", "backward", _own_gradient_only),
        "cp=2 comm=all_gather paths=plain",
    ),
    "ring-forgets": Mutation(
        "of the keys and values that go round the context-parallel ranks the last ones alone count",
        lambda case: case.cp > 1 and case.comm == "p2p" and many_tokens(case),
        replacing(f"{ENGINE}.ring_attention", "_join", _last_part_alone),
        "cp=2 comm=p2p",
    ),
    "temperature-only-in-training": Mutation(
        "log-probabilities ignore the temperature",
        lambda case: case.temperature != 1.0,
        replacing(f"{ENGINE}.worker", "logprobs_of_batch", _drawn_otherwise(temperature=1.0)),
        "temperature=0.7",
    ),
    "filters-only-in-training": Mutation(
        "log-probabilities ignore top-k and top-p",
        lambda case: case.filters,
        replacing(f"{ENGINE}.worker", "logprobs_of_batch", _drawn_otherwise(top_k=None, top_p=1.0)),
        "keep=5 nucleus=0.7",
    ),
    "filters-only-in-logprobs": Mutation(
        "training ignores top-k and top-p",
        lambda case: case.filters and sees_tokens(case),
        replacing(f"{ENGINE}.worker", "train_on_batch", _drawn_otherwise(top_k=None, top_p=1.0)),
        "keep=5 nucleus=0.7",
    ),
    "own-vocabulary-is-filtered": Mutation(
        "each tensor-parallel rank applies top-k and top-p to the vocabulary that it holds",
        lambda case: case.filters and case.tp > 1,
        replacing(f"{ENGINE}.logprobs", "_columns_of_all", lambda original: lambda largest, shard: largest),
        "tp=2 keep=5 nucleus=0.7",
    ),
    "temperature-only-in-logprobs": Mutation(
        "training ignores the temperature",
        lambda case: case.temperature != 1.0 and sees_tokens(case),
        replacing(f"{ENGINE}.worker", "train_on_batch", _drawn_otherwise(temperature=1.0)),
        "temperature=0.7",
    ),
    "sums-not-shared": Mutation(
        "metrics of several global batches add up",
        lambda case: case.together and sees_tokens(case),
        replacing(
            f"{ENGINE}.step", "_averaged_over_batches", lambda original: lambda metrics, loss_fn, count: original(metrics, loss_fn, 1)
        ),
        "together=1",
    ),
    "extremes-summed": Mutation(
        "least and greatest values of micro-batches are added",
        lambda case: _has_ratios(case) and _over_fixed_micro_batches(case),
        replacing(f"{ENGINE}.step", "_averaged_over_batches", _extremes_are_summed),
        "loss=pg micro=2 batching=fixed",
    ),
}
"""The faults by name."""
