"""Counts of operations and host syncs of a packed micro-batch of 2, 16 and 64 sequences, which must not
depend on the number of sequences. Mixtures of 8 and of 32 experts are counted too, with grouped products and
with a loop over experts; with grouped products, the counts must not depend on the number of experts either.

On a GPU each operation is a kernel that the host has to launch, and each sync is a wait in which the host
launches none. Both are counted on a CPU, where the same code runs:

* an operation is a call that torch dispatches to a kernel; views and empty tensors are left out. Attention
  over packed sequences is one call of a FlashAttention kernel on a GPU, so a stand-in of one operation,
  forward and backward, replaces it here;
* each function that torch.compile fuses on a GPU (``fusions=compiled``: gates, and residual with norm) is one
  operation forward and one backward, so stand-ins of one operation replace these functions too;
* a sync is a call that returns values of a tensor to the host, that creates a tensor from a list, or that
  moves a tensor to a device without ``non_blocking``.

Counting global batches of one and of three micro-batches separates the cost per global batch from the cost
per micro-batch.
"""

from __future__ import annotations

import contextlib
import itertools
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from benchmarks import tiny
from benchmarks.point import Metric, Point
from megarl.models.engine.partial_attention import partial_attention, partial_gradients
from megarl.parity.pool import WorkerPool
from megarl.patched import patched

if TYPE_CHECKING:
    from megarl.config.policy import PolicyConfig

TOKENS = 512
SEQUENCES = (2, 16, 64)
EXPERTS = (8, 32)
MOST_OPERATIONS = 700
"""Most operations of a global batch of one micro-batch of four layers: forward and backward, without the
optimizer's step."""
FUSED_SHARE = 0.8
"""Largest share of all operations that may remain with fused functions. It was 0.70 in training and 0.75 for
log-probabilities when this was set."""
VIEWS = frozenset(
    (
        "_reshape_alias",
        "_unsafe_view",
        "alias",
        "as_strided",
        "chunk",
        "detach",
        "empty",
        "empty_like",
        "empty_strided",
        "expand",
        "is_same_size",
        "narrow",
        "new_empty",
        "permute",
        "reshape",
        "select",
        "slice",
        "split",
        "split_with_sizes",
        "squeeze",
        "t",
        "transpose",
        "unbind",
        "unflatten",
        "unsafe_chunk",
        "unsafe_split",
        "unsqueeze",
        "view",
        "view_as",
    )
)
# Each of these operations returns a number to the host, or creates a tensor whose shape depends on values.
HANDED_OVER = frozenset(("_local_scalar_dense", "nonzero", "masked_select", "equal", "_unique2"))


@dataclass
class Count:
    """Counts of operations by name, and of syncs by line of code."""

    operations: Counter[str] = field(default_factory=Counter)
    syncs: Counter[str] = field(default_factory=Counter)


def _place() -> str:
    """Return the file and line of this project or of Megatron-Core that called torch."""
    # Leave out the frames of this function and of the dispatch mode that called it.
    for frame in reversed(traceback.extract_stack()[:-2]):
        if "/torch/" not in frame.filename and not frame.filename.endswith(
            ("benchmarks/cases/operations.py", "cuda_redirect.py")
        ):
            return f"{Path(frame.filename).name}:{frame.lineno}"
    return "unknown"


class _Operations(TorchDispatchMode):
    def __init__(self, count: Count) -> None:
        super().__init__()
        self._count = count

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func.name().split("::")[1].split(".")[0]
        if name in HANDED_OVER:
            self._count.syncs[_place()] += 1
        # _local_scalar_dense copies a number and launches no kernel.
        if name not in VIEWS and name != "_local_scalar_dense":
            self._count.operations[name] += 1
        return func(*args, **(kwargs or {}))


class _Syncs(TorchFunctionMode):
    """Counts syncs that torch does not dispatch, or that are not syncs on a CPU."""

    def __init__(self, count: Count) -> None:
        super().__init__()
        self._count = count

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        options = kwargs or {}
        from_list = (
            func in (torch.tensor, torch.as_tensor)
            and "device" in options
            and isinstance(args[0], list | tuple)
        )
        if from_list or _moves(func, args, options) or func in (Tensor.tolist, Tensor.cpu):
            self._count.syncs[_place()] += 1
        return func(*args, **options)


def _moves(func: Any, args: tuple[Any, ...], options: Mapping[str, Any]) -> bool:
    """Return whether a call moves a tensor to a device and waits for the copy."""
    return (
        func is Tensor.to
        and not options.get("non_blocking")
        and any(map(_is_device, (*args[1:], *options.values())))
    )


def _is_device(value: Any) -> bool:
    return isinstance(value, torch.device) or (isinstance(value, str) and value.startswith(("cpu", "cuda")))


@contextlib.contextmanager
def counting() -> Iterator[Count]:
    """Yield the counts of everything that runs inside the block, including backward passes."""
    count = Count()
    with _Syncs(count), _Operations(count):
        yield count


def measure(quick: bool) -> Iterator[Point]:
    """Yield one point for each number of sequences, for fused functions, and for each mixture. Fail if a
    count depends on the number of sequences or exceeds its bound."""
    pool = WorkerPool()
    try:
        with tempfile.TemporaryDirectory() as directory:
            model = tiny.save_model(Path(directory) / "model", TOKENS)
            counts = {sequences: counts_of(pool, model, sequences) for sequences in SEQUENCES}
            compiled = counts_of(pool, model, SEQUENCES[1], compiled=True)
            mixtures = {
                experts: mixture_counts(pool, Path(directory) / f"experts-{experts}", experts)
                for experts in EXPERTS
            }
    finally:
        pool.close()
    # Yield the counts before they are checked, so that a result that fails still shows them.
    for sequences, found in counts.items():
        yield Point(
            {"sequences": sequences, "tokens": TOKENS},
            {name: Metric.of("calls", [value]) for name, value in found.items()},
        )
    require_few(counts)
    yield Point(
        {"sequences": SEQUENCES[1], "tokens": TOKENS, "fusions": "compiled"},
        {name: Metric.of("calls", [value]) for name, value in compiled.items()},
    )
    require_fewer(compiled, counts[SEQUENCES[1]])
    for experts, kinds in mixtures.items():
        for kind, found in kinds.items():
            counted = {name: Metric.of("calls", [value]) for name, value in found.items()}
            yield Point({"sequences": 16, "tokens": TOKENS, "experts": experts, "kind": kind}, counted)
    require_as_many(mixtures)


def require_as_many(mixtures: Mapping[int, Mapping[str, Mapping[str, int]]]) -> None:
    """Fail if the operations of grouped experts depend on the number of experts.

    Args:
        mixtures: result of ``mixture_counts`` for each number of experts.
    """
    grouped = {experts: kinds["grouped"] for experts, kinds in mixtures.items()}
    assert len({tuple(found.items()) for found in grouped.values()}) == 1, (
        f"counts depend on the number of experts: {grouped}"
    )


def mixture_counts(pool: WorkerPool, directory: Path, experts: int) -> dict[str, dict[str, int]]:
    """Return ``counts_of`` a mixture that routes each token to 4 experts, for ``grouped`` and for
    ``loop``."""
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    sizes = {
        "vocab_size": tiny.VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": tiny.LAYERS,
    }
    heads = {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": TOKENS,
        "sliding_window": None,
    }
    config = MixtralConfig(
        **sizes, **heads, num_local_experts=experts, num_experts_per_tok=4, tie_word_embeddings=False
    )
    MixtralForCausalLM(config).save_pretrained(directory)
    kinds = {"loop": False, "grouped": True}
    return {kind: counts_of(pool, directory, 16, moe_grouped_gemm=grouped) for kind, grouped in kinds.items()}


def require_few(counts: Mapping[int, Mapping[str, int]]) -> None:
    """Fail if a micro-batch has too many operations, has more of them with more sequences, or waits for the
    device.

    Args:
        counts: result of ``counts_of`` for each number of sequences.
    """
    assert len({tuple(found.items()) for found in counts.values()}) == 1, (
        f"counts depend on the number of sequences: {counts}"
    )
    found = next(iter(counts.values()))
    assert found["train_operations"] <= MOST_OPERATIONS, (
        f"{found['train_operations']} operations, at most {MOST_OPERATIONS}: {counts}"
    )
    assert found["train_syncs"] == found["logprob_syncs"] == 0, (
        f"a micro-batch waits for the device: {counts}"
    )


def require_fewer(compiled: Mapping[str, int], plain: Mapping[str, int]) -> None:
    """Fail if functions that torch.compile fuses do not save enough operations, or make a micro-batch
    wait."""
    for name in ("train_operations", "logprob_operations"):
        bound = FUSED_SHARE * plain[name]
        assert compiled[name] <= bound, (
            f"{name}: {compiled[name]} with fusions, {plain[name]} without, of which {bound:g} are the most"
        )
    assert compiled["train_syncs"] == compiled["logprob_syncs"] == 0, (
        f"a micro-batch waits for the device: {compiled}"
    )


def counts_of(
    pool: WorkerPool, model: Path, sequences: int, *, compiled: bool = False, **megatron: Any
) -> dict[str, int]:
    """Return operations and syncs of packed micro-batches of ``sequences`` sequences with ``TOKENS`` tokens
    in total. With ``compiled``, functions are fused as on a GPU. ``megatron`` has keys of ``megatron_cfg``.

    Returns:
        For ``train`` (forward and backward) and ``logprob``: ``_operations`` of a call with one micro-batch,
        ``_syncs`` that two further micro-batches add, and ``_syncs_a_call``, those of a call with one
        micro-batch.
    """
    found = pool.run(1, _counted, _config(model, sequences, megatron_cfg=megatron), sequences, compiled)[0]
    metrics = {}
    for name in ("train", "logprob"):
        one, three = found[name, 1], found[name, 3]
        metrics[f"{name}_operations"] = one.operations.total()
        metrics[f"{name}_syncs"] = three.syncs.total() - one.syncs.total()
        metrics[f"{name}_syncs_a_call"] = one.syncs.total()
    return metrics


def batched_products(pool: WorkerPool, model: Path, **changes: Any) -> dict[str, int]:
    """Return the batched matrix products (``bmm``) of a micro-batch, in ``train`` (forward and backward)
    and in ``logprob``. ``changes`` has keys of the policy."""
    found = pool.run(1, _counted, _config(model, 2, **changes), 2, False)[0]
    return {name: found[name, 1].operations["bmm"] for name in ("train", "logprob")}


def _config(model: Path, sequences: int, **changes: Any) -> dict[str, Any]:
    packing = {"enabled": True, "train_mb_tokens": TOKENS, "logprob_mb_tokens": TOKENS}
    sizes = {"train_global_batch_size": sequences, "max_total_sequence_length": TOKENS}
    return tiny.policy_config(model, micro_batch=1, **sizes, sequence_packing=packing, **changes)


class _Stop(Exception):
    """Raised instead of the optimizer's step."""


def _counted(config: PolicyConfig, sequences: int, compiled: bool) -> dict[tuple[str, int], Count]:
    """Count the operations of calls with one and with three micro-batches, after a warm-up. This runs in a
    worker process."""
    with one_operation_functions() if compiled else contextlib.nullcontext():
        return _counted_of(tiny.worker_of(config), config, sequences)


def _counted_of(worker: Any, config: PolicyConfig, sequences: int) -> dict[tuple[str, int], Count]:
    from megarl.algorithms.loss_functions import NLLLoss
    from megarl.distributed.batched_data_dict import BatchedDataDict
    from megarl.models.policy.batch_plan import shard_batch

    def stop(*arguments: Any) -> None:
        raise _Stop

    found: dict[tuple[str, int], Count] = {}
    with one_operation_attention(), patched((worker.backend, "apply_gradients", stop)):
        for micro_batches in (1, 3):
            rows, length = micro_batches * sequences, TOKENS // sequences
            ids = torch.randint(
                2, tiny.VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(0)
            )
            batch: BatchedDataDict[Any] = BatchedDataDict(
                {"input_ids": ids, "input_lengths": torch.full((rows,), length)}
            )
            logprob = shard_batch(batch, config, 1, phase="logprob").shards[0]
            batch.update(token_mask=torch.ones(rows, length), sample_mask=torch.ones(rows))
            train = shard_batch(batch, config, 1, phase="train", global_batch=rows).shards[0]

            def step(train: BatchedDataDict[Any] = train, rows: int = rows) -> None:
                with contextlib.suppress(_Stop):
                    worker.train(data=train, loss_fn=NLLLoss(), gbs=rows)

            for name, call in (
                ("train", step),
                ("logprob", lambda logprob=logprob: worker.get_logprobs(data=logprob)),
            ):
                found[name, micro_batches] = _warm_count(call)
    worker.backend.close()
    return found


def _warm_count(call: Callable[[], Any]) -> Count:
    # The first call creates caches and buffers that later calls reuse.
    call()
    with counting() as count:
        call()
    return count


@contextlib.contextmanager
def one_operation_attention() -> Iterator[None]:
    """Make attention take the GPU's path inside the block, with a stand-in kernel that is one operation
    forward and one backward."""
    from megarl.models.engine import attention

    with patched((attention, "serves", lambda query: True), (attention, "varlen_kernel", lambda: _stand_in)):
        yield


@contextlib.contextmanager
def one_operation_functions() -> Iterator[None]:
    """Build workers as on a GPU inside the block, with a single operation in place of each function that
    torch.compile fuses there."""
    from megatron.core.fusions import fused_bias_swiglu

    from megarl.models.megatron import residual_norm, settings

    whole, back = fused_bias_swiglu.swiglu, fused_bias_swiglu.swiglu_back
    with patched(
        (settings, "compiles", lambda: True),
        (
            residual_norm,
            "_compiled",
            lambda: tuple(map(_one_operation, (residual_norm._sum_and_norm, residual_norm._gradients))),
        ),
        (fused_bias_swiglu, "swiglu", _one_operation(whole)),
        (fused_bias_swiglu, "swiglu_back", _one_operation(back)),
    ):
        yield


def _one_operation(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``function`` so that a call counts as one operation: the wrapper dispatches a dummy operation,
    then runs ``function`` uncounted."""

    def call(*arguments: Any) -> Any:
        torch.zeros(())
        with _disable_current_modes():
            return function(*arguments)

    return call


def _stand_in(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, 0),
) -> Tensor:
    """Compute attention with the signature of ``varlen_attn``, for runs that attend to all of their own keys
    and to no others."""
    assert window_size == (-1, 0) and max_q == max_k, "a stand-in for whole sequences without a window"
    output, _ = _forward(query, key, value, cu_seq_q, query.shape[-1] ** -0.5 if scale is None else scale)
    return output


# Make this one operator, inside of which the dispatch mode is off, so that it counts as one operation.
@torch.library.custom_op("megarl_benchmarks::varlen", mutates_args=())
def _forward(
    query: Tensor, key: Tensor, value: Tensor, offsets: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Return attention [T, H, D] and its log-sum-exp [T, H], from query [T, H, D], key [T, G, D] and value
    [T, G, D]."""
    parts = [partial_attention(*_whole(run), scale, causal=True) for run in _runs(offsets, query, key, value)]
    return tuple(torch.cat([part[which][0].transpose(0, 1) for part in parts]) for which in (0, 1))


@torch.library.custom_op("megarl_benchmarks::varlen_backward", mutates_args=())
def _backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    logsumexp: Tensor,
    offsets: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    runs = _runs(offsets, gradient, query, key, value, output, logsumexp)
    parts = [partial_gradients(*_whole(run), scale, causal=True) for run in runs]
    return tuple(torch.cat([part[which][0].transpose(0, 1) for part in parts]) for which in (0, 1, 2))


def _runs(offsets: Tensor, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    with torch._C.DisableTorchFunction():  # Do not count what happens inside a kernel.
        limits = offsets.tolist()
    for first, last in itertools.pairwise(limits):
        yield tuple(tensor[first:last] for tensor in tensors)


def _whole(run: Sequence[Tensor]) -> list[Tensor]:
    # Turn [T, H, D] into [1, H, T, D].
    return [tensor.transpose(0, 1)[None].contiguous() for tensor in run]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, offsets, scale = inputs
    ctx.save_for_backward(query, key, value, *output, offsets)
    ctx.scale = scale


def _pull_back(ctx: Any, gradient: Tensor, unused: Tensor) -> tuple[Any, ...]:
    query, key, value, output, logsumexp, offsets = ctx.saved_tensors
    # Offsets and scale have no gradients.
    return (*_backward(gradient, query, key, value, output, logsumexp, offsets, ctx.scale), None, None)


_forward.register_autograd(_pull_back, setup_context=_keep)
