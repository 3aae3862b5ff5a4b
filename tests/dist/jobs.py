"""What the pool's processes run: a real worker on its share of a batch."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from converters.mapping.shards import load_shard
from megarl.distributed.batched_data_dict import BatchedDataDict
from megarl.errors import MegarlError
from megarl.models.engine import decoded_rows, decoding
from megarl.models.engine.graphs import Graphs
from megarl.models.megatron import generation, hf_state, settings
from megarl.models.policy.batch_plan import Phase, ShardedBatch, shard_batch
from megarl.models.policy.megatron_policy_worker import MegatronPolicyWorker
from tests.recording import OperationCount, TapeCapture


@contextlib.contextmanager
def new_memory_is_undefined() -> Iterator[None]:
    """Inside, new tensors are full of NaN until something is written to them, where otherwise what an earlier tensor left may be right."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@contextlib.contextmanager
def gathers_in_their_rows() -> Iterator[list[int]]:
    """Inside, what a rank gives to a gather lies in its own row of what it gets. In another row gloo gathers it all the same, where NCCL
    would overwrite it on the way. Notes the elements of what every gather brings."""
    all_gather = dist.all_gather_into_tensor
    gathers: list[int] = []

    def checked(whole: torch.Tensor, own: torch.Tensor, group: Any = None, **options: Any) -> Any:
        row = whole.view(dist.get_world_size(group), -1)[dist.get_rank(group)]
        if (row.data_ptr(), row.numel(), row.dtype) != (own.data_ptr(), own.numel(), own.dtype):
            raise AssertionError(f"rank {dist.get_rank(group)} sends from another place than its row")
        gathers.append(whole.numel())
        return all_gather(whole, own, group=group, **options)

    with mock.patch.object(dist, "all_gather_into_tensor", checked):
        yield gathers


def build(config: Mapping[str, Any], **options: Any) -> MegatronPolicyWorker:
    return MegatronPolicyWorker(config, None, **options)


def dealt(
    worker: MegatronPolicyWorker, batch: Mapping[str, Any], phase: Phase, global_batch: int | None = None, rows_together: int = 1
) -> ShardedBatch:
    """The batch as the driver deals it to the replicas."""
    replicas = worker.backend.groups.data_size
    return shard_batch(BatchedDataDict(batch), worker.cfg, replicas, phase=phase, global_batch=global_batch, rows_together=rows_together)


def my_share(worker: MegatronPolicyWorker, batch: Mapping[str, Any], global_batch: int | None = None) -> BatchedDataDict[Any]:
    groups = worker.backend.groups
    return BatchedDataDict(batch).shard_by_batch_size(groups.data_size, batch_size=global_batch)[groups.data_rank]


def full_weights(worker: MegatronPolicyWorker) -> dict[str, torch.Tensor]:
    return {name: tensor.clone().cpu() for name, tensor in worker.backend.export_hf()}


def logprobs(config: Mapping[str, Any], batch: Mapping[str, Any]) -> torch.Tensor:
    """Log-probabilities of the whole batch, in its order."""
    worker = build(config, init_optimizer=False, init_reference_model=False)
    values = logprobs_of(worker, batch)
    worker.backend.close()
    return values


def logprobs_of(worker: MegatronPolicyWorker, batch: Mapping[str, Any]) -> torch.Tensor:
    """The same of a worker that is there."""
    sharded = dealt(worker, batch, "logprob")
    mine = worker.get_logprobs(data=sharded.shards[worker.backend.groups.data_rank])["logprobs"]
    shares: list[Any] = [None] * worker.backend.groups.data_size
    dist.all_gather_object(shares, mine, group=worker.backend.groups.data)
    return sharded.restore(shares)


def train(config: Mapping[str, Any], batches: list[Mapping[str, Any]], loss_fn: Any) -> dict[str, Any]:
    """Losses, gradient norms, summed metrics and the weights after one ``train()`` call for each batch."""
    worker = build(config, init_reference_model=False)
    losses, norms, metrics = [], [], []
    for batch in batches:
        sharded = dealt(worker, batch, "train", config["train_global_batch_size"], getattr(loss_fn, "rows_together", 1))
        result = worker.train(data=sharded.shards[worker.backend.groups.data_rank], loss_fn=loss_fn)
        losses.append(result["global_loss"].tolist())
        norms.append(float(result["grad_norm"]))
        metrics.append(result["all_mb_metrics"])
    weights = full_weights(worker)
    worker.backend.close()
    return {"losses": losses, "norms": norms, "metrics": metrics, "weights": weights}


def prompts_in_several_passes() -> contextlib.AbstractContextManager[Any]:
    """Inside, a pass is cheap, so that also a few short prompts are read in several."""
    return mock.patch.object(decoding, "PASS_POSITIONS", 3)


def train_with_fusions(config: Mapping[str, Any], batches: list[Mapping[str, Any]], loss_fn: Any) -> dict[str, Any]:
    """As ``train``, with the functions that torch.compile fuses on a GPU, run operation by operation."""
    with mock.patch.object(settings, "compiles", lambda: True), torch.compiler.set_stance("force_eager"):
        return train(config, batches, loss_fn)


def generate(config: Mapping[str, Any], batch: Mapping[str, Any], greedy: bool, tokenizer: Any = None) -> dict[str, Any]:
    """Generated batch of every data-parallel rank in order, and the log-probabilities that get_logprobs gives the same tokens."""
    worker = MegatronPolicyWorker(config, tokenizer, init_optimizer=False, init_reference_model=False)
    with prompts_in_several_passes():
        output = worker.generate(data=my_share(worker, batch), greedy=greedy)
    check = {"input_ids": output["output_ids"], "input_lengths": output["unpadded_sequence_lengths"]}
    recomputed = worker.get_logprobs(data=BatchedDataDict(check))["logprobs"]
    shares: list[Any] = [None] * worker.backend.groups.data_size
    dist.all_gather_object(shares, (dict(output), recomputed), group=worker.backend.groups.data)
    worker.backend.close()
    rows = []
    for share, logprobs in shares:
        for row in range(share["output_ids"].shape[0]):
            total = int(share["unpadded_sequence_lengths"][row])
            new = int(share["generation_lengths"][row])
            rows.append(
                {
                    "ids": share["output_ids"][row, :total].tolist(),
                    "padding": share["output_ids"][row, total:].tolist(),
                    "new": new,
                    "logprobs": share["logprobs"][row, total - new : total],
                    "others": torch.cat([share["logprobs"][row, : total - new], share["logprobs"][row, total:]]),
                    "recomputed": logprobs[row, total - new : total],
                }
            )
    return {"rows": rows}


def generate_recorded(config: Mapping[str, Any], batch: Mapping[str, Any], greedy: bool) -> dict[str, Any]:
    """``generate`` whose steps are recorded and run from the recording, at several sizes of the cache; with how many were, and whether the
    last call still recorded."""
    with recorded_steps(checked=dist.get_world_size() == 1) as graphs:
        result = generate(config, batch, greedy)
    return {**result, "recorded and replayed": recorded_and_replayed(graphs)}


def recorded_and_replayed(graphs: list[Graphs]) -> tuple[int, int] | None:
    """Of the last call; None where it did not record until its end."""
    capture = graphs[-1].capture
    return (capture.recorded, capture.replayed) if isinstance(capture, TapeCapture) else None


@contextlib.contextmanager
def recorded_steps(*, checked: bool, backend: Any = generation) -> Iterator[list[Graphs]]:
    """Inside, Megatron's steps are recorded as on a CUDA device, or those of another ``backend``, its module of generation."""
    # not before megarl.models.megatron has prepared it
    from megatron.core.transformer.moe import router as routers

    made: list[Graphs] = []

    def graphs_on(device: torch.device, refusal: str | None = None) -> Graphs:
        made.append(Graphs(None if refusal else TapeCapture(checked=checked)))
        return made[-1]

    def gating(router: Any, hidden: torch.Tensor) -> torch.Tensor:
        dtype = {"fp32": torch.float32, "fp64": torch.float64}.get(router.config.moe_router_dtype, hidden.dtype)
        return routers.router_gating_linear(hidden, router.weight, router.bias, dtype)

    with (
        mock.patch.object(backend, "graphs_on", graphs_on),
        mock.patch.object(decoded_rows, "FEWEST_POSITIONS", 4),
        # on a CPU Megatron-Core's own moves the weight to where it is, of which a run on tensors without values would leave nothing
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


def loaded(config: Mapping[str, Any]) -> tuple[list[str], dict[str, torch.Tensor]]:
    """Which parameters this rank read of the files when it was built, and its weights."""
    read: list[str] = []

    def reading(rule: Any, *arguments: Any, **options: Any) -> torch.Tensor:
        read.append(rule.megatron_name)
        return load_shard(rule, *arguments, **options)

    with mock.patch.object(hf_state, "load_shard", reading), new_memory_is_undefined():
        worker = build(config)
    weights = full_weights(worker)
    worker.backend.close()
    return read, weights


def loaded_bytes(config: Mapping[str, Any]) -> dict[str, int]:
    """Bytes of parameters that this rank read of the files (``read``) and got from other ranks (``got``) when it was built; those of its
    own parameters (``own``), and of all of the model (``model``)."""
    counted = {"read": 0, "got": 0}
    send = dist.broadcast

    def reading(*arguments: Any, **options: Any) -> torch.Tensor:
        shard = load_shard(*arguments, **options)
        counted["read"] += shard.nbytes
        return shard

    def sending(tensor: torch.Tensor, src: int, group: Any = None, **options: Any) -> Any:
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

    def reading(*arguments: Any, **options: Any) -> torch.Tensor:
        if dist.get_rank() == 0 and next(turns) > 0:
            raise OSError("the disk is gone")
        return load_shard(*arguments, **options)

    with mock.patch.object(hf_state, "load_shard", reading):
        try:
            build(config)
        except (OSError, MegarlError) as error:
            return f"{type(error).__name__}: {error}"
    return ""
