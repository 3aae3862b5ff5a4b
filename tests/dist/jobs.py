"""What the pool's processes run: a real worker on its share of a batch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from converters.mapping.shards import load_shard
from megarl.config.backend import enabled_backend
from megarl.distributed.batched_data_dict import BatchedDataDict
from megarl.models.engine import decoded_rows, decoding
from megarl.models.engine.graphs import Graphs
from megarl.models.huggingface import generation as torch_generation
from megarl.models.megatron import generation, hf_state, settings
from megarl.models.policy.batch_plan import Phase, ShardedBatch, shard_batch
from megarl.models.policy.dtensor_policy_worker import DTensorPolicyWorker
from megarl.models.policy.fsdp1_policy_worker import FSDP1PolicyWorker
from megarl.models.policy.megatron_policy_worker import MegatronPolicyWorker
from tests.recording import OperationCount, TapeCapture


@contextlib.contextmanager
def new_memory_is_undefined() -> Iterator[None]:
    """Inside, new tensors are full of NaN until something is written to them, where otherwise what an earlier
    tensor left may be right."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@contextlib.contextmanager
def gathers_in_their_rows() -> Iterator[list[int]]:
    """Inside, what a rank gives to a gather lies in its own row of what it gets. In another row gloo gathers
    it all the same, where NCCL would overwrite it on the way. Notes the elements of what every gather
    brings."""
    all_gather = dist.all_gather_into_tensor
    gathers: list[int] = []

    def checked(whole: Tensor, own: Tensor, group: Any = None, **options: Any) -> Any:
        row = whole.view(dist.get_world_size(group), -1)[dist.get_rank(group)]
        if (row.data_ptr(), row.numel(), row.dtype) != (own.data_ptr(), own.numel(), own.dtype):
            raise AssertionError(f"rank {dist.get_rank(group)} sends from another place than its row")
        gathers.append(whole.numel())
        return all_gather(whole, own, group=group, **options)

    with mock.patch.object(dist, "all_gather_into_tensor", checked):
        yield gathers


WORKERS: Mapping[str, Callable[..., Any]] = {
    "megatron": MegatronPolicyWorker,
    "dtensor": DTensorPolicyWorker,
    "fsdp1": FSDP1PolicyWorker,
}


def build(config: Mapping[str, Any], *, tokenizer: Any = None, **options: Any) -> Any:
    """A worker of the backend that the configuration enables."""
    return WORKERS[enabled_backend(config)](config, tokenizer, **options)


def said(call: Callable[[], Any]) -> str:
    """Class and message of what a call raises; "no error" where it raises nothing."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def build_error(config: Mapping[str, Any]) -> str:
    return said(lambda: build(config))


def dealt(
    worker: Any,
    batch: Mapping[str, Any],
    phase: Phase,
    global_batch: int | None = None,
    rows_together: int = 1,
) -> ShardedBatch:
    """The batch as the driver deals it to the replicas."""
    replicas = worker.backend.groups.data_size
    return shard_batch(
        BatchedDataDict(batch),
        worker.cfg,
        replicas,
        phase=phase,
        global_batch=global_batch,
        rows_together=rows_together,
    )


def my_share(
    worker: Any, batch: Mapping[str, Any], global_batch: int | None = None, rows_together: int = 1
) -> BatchedDataDict[Any]:
    """Rows of this replica in a training step."""
    sharded = dealt(
        worker, batch, "train", global_batch or worker.cfg["train_global_batch_size"], rows_together
    )
    return sharded.shards[worker.backend.groups.data_rank]


def full_weights(worker: Any) -> dict[str, Tensor]:
    return {name: tensor.clone().cpu() for name, tensor in worker.backend.export_hf()}


def logprobs(config: Mapping[str, Any], batch: Mapping[str, Any]) -> Tensor:
    """Log-probabilities of the whole batch, in its order."""
    worker = build(config, init_optimizer=False, init_reference_model=False)
    values = logprobs_of(worker, batch)
    worker.backend.close()
    return values


def logprobs_of(worker: Any, batch: Mapping[str, Any], method: str = "get_logprobs") -> Tensor:
    """The same of a worker that is there; or what another method says of every token."""
    sharded = dealt(worker, batch, "logprob")
    groups = worker.backend.groups
    (mine,) = getattr(worker, method)(data=sharded.shards[groups.data_rank]).values()
    return sharded.restore(of_replicas(worker, mine))


def of_replicas(worker: Any, mine: Any) -> list[Any]:
    """What each replica has, in their order."""
    groups = worker.backend.groups
    shares: list[Any] = [None] * groups.data_size
    dist.all_gather_object(shares, mine, group=groups.data)
    return shares


def step(worker: Any, batch: Mapping[str, Any], loss_fn: Any) -> tuple[float, float, float]:
    """(loss, gradient norm, learning rate) of one global batch."""
    result = worker.train(
        data=my_share(worker, batch, None, getattr(loss_fn, "rows_together", 1)), loss_fn=loss_fn
    )
    return float(result["global_loss"]), float(result["grad_norm"]), result["all_mb_metrics"]["lr"][-1]


def train(
    config: Mapping[str, Any], batches: list[Mapping[str, Any]], loss_fn: Any, **options: Any
) -> dict[str, Any]:
    """Losses, gradient norms, learning rates, metrics of this replica and the weights after one ``train()``
    call for each batch."""
    worker = build(config, init_reference_model=False, **options)
    results = [
        worker.train(
            data=my_share(worker, batch, None, getattr(loss_fn, "rows_together", 1)), loss_fn=loss_fn
        )
        for batch in batches
    ]
    weights = full_weights(worker)
    worker.backend.close()
    return {
        "losses": [float(result["global_loss"]) for result in results],
        "norms": [float(result["grad_norm"]) for result in results],
        "metrics": [result["all_mb_metrics"] for result in results],
        "weights": weights,
    }


def prompts_in_several_passes() -> contextlib.AbstractContextManager[Any]:
    """Inside, a pass is cheap, so that also a few short prompts are read in several."""
    return mock.patch.object(decoding, "PASS_POSITIONS", 3)


def train_with_fusions(
    config: Mapping[str, Any], batches: list[Mapping[str, Any]], loss_fn: Any
) -> dict[str, Any]:
    """As ``train``, with the functions that torch.compile fuses on a GPU, run operation by operation."""
    with mock.patch.object(settings, "compiles", lambda: True), torch.compiler.set_stance("force_eager"):
        return train(config, batches, loss_fn)


def generate(
    config: Mapping[str, Any], batch: Mapping[str, Any], greedy: bool, tokenizer: Any = None
) -> list[dict[str, Any]]:
    """Rows of all replicas in order, some of which may get no prompt at all, with get_logprobs'
    log-probabilities of the same tokens."""
    worker = build(config, tokenizer=tokenizer, init_optimizer=False, init_reference_model=False)
    groups = worker.backend.groups
    shards = BatchedDataDict(batch).shard_by_batch_size(
        groups.data_size, batch_size=None, allow_uneven_shards=True
    )
    with prompts_in_several_passes():
        output = worker.generate(data=shards[groups.data_rank], greedy=greedy)
    rows = []
    for ids, total, new, truncated, values in zip(
        output["output_ids"],
        output["unpadded_sequence_lengths"].tolist(),
        output["generation_lengths"].tolist(),
        output["truncated"].tolist(),
        output["logprobs"],
        strict=True,
    ):
        rows.append(
            {
                "ids": ids[:total].tolist(),
                "padding": ids[total:].tolist(),
                "new": new,
                "truncated": truncated,
                "logprobs": values[total - new : total],
                "others": torch.cat([values[: total - new], values[total:]]),
            }
        )
    every = [row for share in of_replicas(worker, rows) for row in share]
    width = max(len(row["ids"]) for row in every)
    ids = torch.tensor([row["ids"] + [0] * (width - len(row["ids"])) for row in every])
    recomputed = logprobs_of(
        worker, {"input_ids": ids, "input_lengths": torch.tensor([len(row["ids"]) for row in every])}
    )
    for row, values in zip(every, recomputed, strict=True):
        row["recomputed"] = values[len(row["ids"]) - row["new"] : len(row["ids"])]
    worker.backend.close()
    return every


def generate_recorded(
    config: Mapping[str, Any], batch: Mapping[str, Any], greedy: bool
) -> tuple[list[dict[str, Any]], tuple[int, int] | None]:
    """``generate`` whose steps are recorded and run from the recording, at several sizes of the cache; with
    how many were, and whether the last call still recorded."""
    with recorded_steps(
        checked=dist.get_world_size() == 1, backend=GENERATION[enabled_backend(config)]
    ) as graphs:
        return generate(config, batch, greedy), recorded_and_replayed(graphs)


def recorded_and_replayed(graphs: list[Graphs]) -> tuple[int, int] | None:
    """Of the last call; None where it did not record until its end."""
    capture = graphs[-1].capture
    return (capture.recorded, capture.replayed) if isinstance(capture, TapeCapture) else None


GENERATION = {"megatron": generation, "dtensor": torch_generation, "fsdp1": torch_generation}


@contextlib.contextmanager
def recorded_steps(*, checked: bool, backend: Any = generation) -> Iterator[list[Graphs]]:
    """Inside, Megatron's steps are recorded as on a CUDA device, or those of another ``backend``, its module
    of generation."""
    # not before megarl.models.megatron has prepared it
    from megatron.core.transformer.moe import router as routers

    made: list[Graphs] = []

    def graphs_on(device: torch.device, refusal: str | None = None) -> Graphs:
        made.append(Graphs(None if refusal else TapeCapture(checked=checked)))
        return made[-1]

    def gating(router: Any, hidden: Tensor) -> Tensor:
        dtype = {"fp32": torch.float32, "fp64": torch.float64}.get(
            router.config.moe_router_dtype, hidden.dtype
        )
        return routers.router_gating_linear(hidden, router.weight, router.bias, dtype)

    with (
        mock.patch.object(backend, "graphs_on", graphs_on),
        mock.patch.object(decoded_rows, "FEWEST_POSITIONS", 4),
        # on a CPU Megatron-Core's own moves the weight to where it is, of which a run on tensors without
        # values would leave nothing
        mock.patch.object(routers.TopKRouter, "gating", gating),
    ):
        yield made


def operations_of_a_token(config: Mapping[str, Any], batch: Mapping[str, Any]) -> dict[str, float]:
    """Operations and replays of one more token of all rows, ``recorded`` and ``not recorded``."""
    worker = MegatronPolicyWorker(config, None, init_optimizer=False, init_reference_model=False)

    def count(tokens: int) -> int:
        worker.backend.policy["generation"]["max_new_tokens"] = tokens
        with OperationCount() as operations:
            worker.generate(data=BatchedDataDict(batch), greedy=False)
        return operations.count

    # no size of the cache begins between them
    fewer, more = (tokens - int(batch["input_lengths"].max()) for tokens in (20, 30))
    plain = (count(more) - count(fewer)) / (more - fewer)
    with recorded_steps(checked=False) as graphs:
        outside = (count(more) - count(fewer)) / (more - fewer)
    replays = [graph.capture.replayed for graph in graphs]
    worker.backend.close()
    return {"not recorded": plain, "recorded": outside + (replays[0] - replays[1]) / (more - fewer)}


def loaded(config: Mapping[str, Any]) -> tuple[list[str], dict[str, Tensor]]:
    """Which parameters this rank read of the files when it was built, and its weights."""
    read: list[str] = []

    def reading(rule: Any, *arguments: Any, **options: Any) -> Tensor:
        read.append(rule.megatron_name)
        return load_shard(rule, *arguments, **options)

    with mock.patch.object(hf_state, "load_shard", reading), new_memory_is_undefined():
        worker = build(config)
    weights = full_weights(worker)
    worker.backend.close()
    return read, weights


def loaded_bytes(config: Mapping[str, Any]) -> dict[str, int]:
    """Bytes of parameters that this rank read of the files (``read``) and got from other ranks (``got``) when
    it was built; those of its own parameters (``own``), and of all of the model (``model``)."""
    counted = {"read": 0, "got": 0}
    send = dist.broadcast

    def reading(*arguments: Any, **options: Any) -> Tensor:
        shard = load_shard(*arguments, **options)
        counted["read"] += shard.nbytes
        return shard

    def sending(tensor: Tensor, src: int, group: Any = None, **options: Any) -> Any:
        counted["got"] += tensor.nbytes * (src != dist.get_rank())
        return send(tensor, src=src, group=group, **options)

    with mock.patch.object(hf_state, "load_shard", reading), mock.patch.object(dist, "broadcast", sending):
        worker = build(config, init_reference_model=False)
    own = sum(parameter.nbytes for _, parameter in worker.backend.parameters())
    whole = sum(tensor.nbytes for tensor in full_weights(worker).values())
    worker.backend.close()
    return {**counted, "own": own, "model": whole}


def not_loaded(config: Mapping[str, Any]) -> str:
    """What this rank says where the first rank cannot read one of its slices, after it has read another."""
    turns = iter(range(1000))

    def reading(*arguments: Any, **options: Any) -> Tensor:
        if dist.get_rank() == 0 and next(turns) > 0:
            raise OSError("the disk is gone")
        return load_shard(*arguments, **options)

    with mock.patch.object(hf_state, "load_shard", reading):
        return build_error(config)
