"""The driver's work between the phases of a GRPO step: CPU seconds and bytes, by the number of samples.

Whole steps of GRPO on a real policy over Ray, whose workers answer at once in place of a model: what is left is what the driver does.
"""

from __future__ import annotations

import contextlib
import hashlib
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import ray
import torch

from benchmarks.point import Metric, Point
from benchmarks.timing import cpu_in_turn
from megarl.distributed.batched_data_dict import BatchedDataDict
from megarl.distributed.ray_runtime import init_ray
from megarl.distributed.virtual_cluster import RayVirtualCluster

LENGTH, PROMPT, ANSWER = 512, 96, 256
"""Positions of a row, and the longest prompt and answer but for one, which fills its row: 39 % of the positions are real."""
ANSWERS = 8
DATA, TENSOR = 2, 2
SEED = 5


class AnsweringWorker:
    """One rank of a policy without a model. Keeps what the latest ``train`` got."""

    def __init__(self, config: Mapping[str, Any], tokenizer: Any, **unused: Any) -> None:
        torch.set_num_threads(1)
        self._vocabulary = len(tokenizer)
        self._trained: Mapping[str, Any] = {}

    def generate(self, data: BatchedDataDict[Any], greedy: bool = False) -> BatchedDataDict[Any]:
        """Random answers, of lengths that are random too; the first row is full."""
        rows, width = data["input_ids"].shape
        generator = torch.Generator().manual_seed(int(data["sampling_seeds"][0]))
        new = torch.randint(16, ANSWER + 1, (rows,), generator=generator)
        new[0] = LENGTH - data["input_lengths"][0]
        lengths = data["input_lengths"] + new
        places = torch.arange(LENGTH)[None]
        answered = (places >= data["input_lengths"][:, None]) & (places < lengths[:, None])
        drawn = torch.randint(3, self._vocabulary, (rows, LENGTH), generator=generator)
        ids = torch.nn.functional.pad(data["input_ids"], (0, LENGTH - width)).where(~answered, drawn)
        logprobs = -torch.rand((rows, LENGTH), generator=generator).where(answered, 0.0)
        return BatchedDataDict({"output_ids": ids, "logprobs": logprobs, "generation_lengths": new, "unpadded_sequence_lengths": lengths})

    def get_logprobs(self, data: BatchedDataDict[Any], *, skip_masked: bool = False) -> BatchedDataDict[Any]:
        """The ids as fractions; padding is 0."""
        inside = torch.arange(data["input_ids"].shape[1])[None] < data["input_lengths"][:, None]
        return BatchedDataDict({"logprobs": (-data["input_ids"] / self._vocabulary).where(inside, 0.0)})

    def train(self, data: BatchedDataDict[Any], **unused: Any) -> dict[str, Any]:
        """Nothing is learned."""
        self._trained = data
        result = {"global_loss": torch.zeros(1), "grad_norm": torch.tensor(1.0), "all_mb_metrics": {}, "skipped": []}
        positions = data["input_ids"].numel()
        return {**result, "positions": positions, "gpu_info": self.get_gpu_info()}

    def digests(self) -> dict[str, str]:
        """A digest of each column that arrived, and of the plan."""
        return digests(self._trained)

    def prepare_for_generation(self) -> None:
        """There is nothing to move."""

    def prepare_for_lp_inference(self) -> None:
        """There is nothing to move."""

    def prepare_for_training(self) -> None:
        """There is nothing to move."""

    def get_gpu_info(self) -> dict[str, Any]:
        """Memory figures."""
        return {"memory_reserved_mb": 1.0, "peak_memory_reserved_mb": 1.0}


def digests(shard: Mapping[str, Any]) -> dict[str, str]:
    """A digest of the type, shape and bytes of each column of a shard, and of its plan."""
    found = {
        name: hashlib.sha256(f"{value.dtype} {list(value.shape)}".encode() + value.contiguous().numpy().tobytes()).hexdigest()
        for name, value in shard.items()
    }
    return {**found, "plan": repr((shard.micro_batch_indices, shard.micro_batch_lengths, shard.elem_counts_per_gb))}


class _RewardedAtOnce:
    """An environment whose rewards cost next to nothing."""

    def step(self, turn: Any) -> Any:
        from megarl.rollout.environment import EnvironmentReturn

        rows = len(turn.responses)
        return EnvironmentReturn([len(response) % 3 / 2 for response in turn.responses], [True] * rows, [False] * rows)


def measure(quick: bool) -> Iterator[Point]:
    """Numbers of samples, on two data-parallel replicas of two tensor-parallel ranks."""
    from megarl.quickstart.material import make_tokenizer

    torch.set_num_threads(1)
    init_ray(num_cpus=16, log_to_driver=False)
    tokenizer = make_tokenizer()
    try:
        with tempfile.TemporaryDirectory() as directory:
            for samples in (64, 256) if quick else (256, 2048, 8192):
                with _policy(Path(directory) / str(samples), tokenizer, samples) as policy:
                    yield Point({"samples": samples, "positions": LENGTH}, _metrics(policy, tokenizer, samples, 3 if quick else 5))
    finally:
        ray.shutdown()


@contextlib.contextmanager
def _policy(directory: Path, tokenizer: Any, samples: int) -> Iterator[Any]:
    from benchmarks import tiny
    from megarl.models.policy import lm_policy

    model = tiny.save_model(directory, LENGTH, vocab_size=len(tokenizer), hidden_size=16, intermediate_size=16, num_hidden_layers=1)
    config = tiny.policy_config(
        model,
        micro_batch=1,
        tensor_parallel=TENSOR,
        ranks=DATA * TENSOR,
        train_global_batch_size=samples,
        max_total_sequence_length=LENGTH,
        generation={"max_new_tokens": LENGTH, "temperature": 1.0, "top_p": 1.0, "top_k": None},
        sequence_packing={"enabled": True, "train_mb_tokens": 16 * LENGTH, "logprob_mb_tokens": 16 * LENGTH},
    )
    cluster = RayVirtualCluster([DATA * TENSOR], use_gpus=False)
    with mock.patch.dict(lm_policy.WORKERS, {"megatron": f"{__name__}.{AnsweringWorker.__name__}"}):
        policy = lm_policy.Policy(cluster, config, tokenizer, init_timeout_s=120)
    try:
        yield policy
    finally:
        policy.worker_group.shutdown(force=True)
        cluster.shutdown()


def _metrics(policy: Any, tokenizer: Any, samples: int, repeats: int) -> dict[str, Metric]:
    step, sent = _step(policy, tokenizer, samples), _Sent(policy)
    with sent.recording():
        step(0)
    _check(policy, sent.batches["train"])
    copies: dict[str, Callable[[], Any]] = {
        "step": lambda: step(1),
        "copy": lambda: [column.clone() for column in sent.batches["train"].values()],
    }
    seconds = cpu_in_turn(copies, repeats)
    valid = sum(valid_bytes(batch) for batch in sent.batches.values())
    return {
        "driver": Metric.ratio("one copy of the batch", seconds["step"], seconds["copy"]),
        "driver_cpu_seconds": Metric.of("s", seconds["step"]),
        "copy_cpu_seconds": Metric.of("s", seconds["copy"]),
        "bytes_shipped": Metric.of("ratio to the bytes of the valid positions", [sent.bytes / valid]),
        "megabytes_shipped": Metric.of("MB", [sent.bytes / 1e6]),
    }


def _step(policy: Any, tokenizer: Any, samples: int) -> Callable[[int], Any]:
    """A whole step of GRPO, with the memory figures that the loop asks for after it."""
    from benchmarks import tiny
    from megarl.algorithms.algorithm import ACTOR, Parts
    from megarl.algorithms.grpo import GRPO
    from megarl.algorithms.skipped_batches import SkippedBatches
    from megarl.config.defaults import complete_run
    from megarl.data.datasets import Dataset
    from megarl.observe.timing import PhaseTimer

    given = {
        "algorithm": "grpo",
        "grpo": {"num_prompts_per_step": samples // ANSWERS, "num_generations_per_prompt": ANSWERS},
        "loss_fn": tiny.CLIPPED_LOSS,
        "env": {"reward": "exact_match"},
        "seed": SEED,
    }
    data = Dataset(_examples(samples // ANSWERS, len(tokenizer)), "")
    order = SimpleNamespace(take=range, epoch=0)
    config = {**complete_run(given), "policy": policy.cfg}
    parts = Parts(
        config,
        {ACTOR: policy},
        None,
        tokenizer,
        _RewardedAtOnce(),
        data,
        None,
        order,
        PhaseTimer(),
        SkippedBatches(),  # type: ignore[arg-type]
    )
    algorithm = GRPO(parts)

    def step(number: int) -> None:
        algorithm.step(number)
        policy.memory_figures()

    return step


def _examples(prompts: int, vocabulary: int) -> Any:
    from megarl.data.datasets import Example

    generator = torch.Generator().manual_seed(SEED)
    lengths = torch.randint(PROMPT // 3, PROMPT + 1, (prompts,), generator=generator).tolist()
    rows = [torch.randint(3, vocabulary, (length,), generator=generator).tolist() for length in lengths]
    return tuple(Example(index, tuple(row), (), "") for index, row in enumerate(rows))


class _Sent:
    """What goes from the driver to the workers while it records.

    Attributes:
        batches: the latest batch of each method.
        bytes: of all that was made ready for Ray's store or for the messages of calls; the answers are not among them.
    """

    METHODS = ("generate", "get_logprobs", "train")

    def __init__(self, policy: Any) -> None:
        self._policy = policy
        self.batches: dict[str, Any] = {}
        self.bytes = 0

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        context = ray._private.worker.global_worker.get_serialization_context()
        with contextlib.ExitStack() as stack:
            for method in self.METHODS:
                stack.enter_context(mock.patch.object(self._policy, method, self._noting(method, getattr(self._policy, method))))
            stack.enter_context(mock.patch.object(context, "serialize", self._counting(context.serialize)))
            yield

    def _noting(self, method: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def noted(data: Any, *args: Any, **kwargs: Any) -> Any:
            self.batches[method] = data if method != "get_logprobs" else {key: data[key] for key in ("input_ids", "input_lengths")}
            return call(data, *args, **kwargs)

        return noted

    def _counting(self, serialize: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def counted(value: Any) -> Any:
            stored = serialize(value)
            self.bytes += stored.total_bytes
            return stored

        return counted


def valid_bytes(batch: Mapping[str, Any]) -> int:
    """Bytes of a batch's columns without padding."""
    tokens = int(batch["input_lengths"].sum())
    return sum((tokens if value.ndim > 1 else len(value)) * value.element_size() for value in batch.values())


def _check(policy: Any, batch: BatchedDataDict[Any]) -> None:
    """What each rank got is its replica's shard of the batch, to the bit."""
    from megarl.models.policy.batch_plan import shard_batch

    dealt = shard_batch(batch, policy.cfg, DATA, phase="train", global_batch=batch.size, hidden_size=policy._hidden_size)
    expected = [digests(shard) for shard in dealt.shards for _ in range(TENSOR)]
    arrived = policy._results("digests")
    assert arrived == expected, "a worker got other columns than the driver dealt"
