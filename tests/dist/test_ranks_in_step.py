"""What would leave some ranks waiting or go on with nonsense ends on all ranks that are concerned, with a
reason, and they can go on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from megarl.distributed.batched_data_dict import BatchedDataDict
from megarl.models.engine import worker_state
from megarl.parity.pool import WorkerPool
from tests.dist import jobs
from tests.dist.batches import make_batch
from tests.dist.checks import prompts
from tests.dist.layouts import CONFIG
from tests.models import make_tiny, policy_config
from tests.tiers import sampled

POISON = 77


def attempt(function: Callable[[], Any]) -> Any:
    """What it returned, or class and message of what it raised."""
    try:
        return function()
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def logprobs_of_shares(
    kind: str, config: Mapping[str, Any], batch: Mapping[str, Any], rows: list[int]
) -> list[Any]:
    """Log-probabilities where rank r has so many ``rows`` of the batch, and where every rank has three."""
    worker = jobs.build(config, init_optimizer=False, init_reference_model=False)
    outcomes = []
    for mine in (rows[dist.get_rank()], 3):
        share = BatchedDataDict({key: value[:mine] for key, value in batch.items()})
        outcomes.append(
            attempt(lambda share=share: worker.get_logprobs(data=share, micro_batch_size=2)["logprobs"])
        )  # type: ignore[misc]
    worker.backend.close()
    return outcomes


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("mixture") / "mixtral", "mixtral", tied=False, seed=3)


@sampled("values")
@pytest.mark.parametrize("rows", [[2, 0], [0, 2], [4, 2]], ids=str)
@pytest.mark.parametrize(
    ("kind", "options"), [("megatron", {"ep": 2}), ("dtensor", {}), ("fsdp1", {})], ids=str
)
def test_replicas_whose_passes_meet_need_equal_numbers(
    pool: WorkerPool,
    tiny_models: dict[str, Path],
    mixture: Path,
    kind: str,
    options: dict[str, Any],
    rows: list[int],
) -> None:
    config = CONFIG[kind](mixture if options else tiny_models["qwen2"], **options)
    counts = [-(-count // 2) for count in rows]
    for uneven, even in pool.run(2, logprobs_of_shares, kind, config, make_batch(6, 9, seed=1), rows):
        assert uneven.startswith(f"BatchError: data-parallel replicas have {counts} micro-batches"), uneven
        assert even.shape == (3, 9)


@pytest.mark.parametrize("rows", [[2, 0], [5, 1]], ids=str)
def test_replicas_that_run_for_themselves_need_not(
    pool: WorkerPool, tiny_models: dict[str, Path], rows: list[int]
) -> None:
    results = pool.run(
        2, logprobs_of_shares, "megatron", policy_config(tiny_models["qwen2"]), make_batch(6, 9, seed=1), rows
    )
    assert [result[0].shape for result in results] == [(count, 9) for count in rows]


@pytest.mark.parametrize("kind", CONFIG)
def test_no_rows_anywhere_are_no_error(pool: WorkerPool, tiny_models: dict[str, Path], kind: str) -> None:
    config = CONFIG[kind](tiny_models["qwen2"])
    for nothing, _ in pool.run(2, logprobs_of_shares, kind, config, make_batch(6, 9, seed=1), [0, 0]):
        assert nothing.shape == (0, 9) and nothing.dtype == torch.float32


def poisoned(model: Path, directory: Path) -> Path:
    """The model with NaN for the embedding of one token, so that what follows it is NaN and nothing else."""
    directory.mkdir()
    for file in model.glob("*.json"):
        (directory / file.name).write_text(file.read_text())
    weights = load_file(model / "model.safetensors")
    weights["model.embed_tokens.weight"][POISON] = torch.nan
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def generate_twice(
    kind: str, config: Mapping[str, Any], batches: list[Mapping[str, Any]], greedy: bool
) -> list[Any]:
    """The ids of the answers of each batch, all rows on every replica, or what was raised."""
    # a model that arrives with NaN is refused; one that has become so is what is tried here
    with mock.patch.object(worker_state, "require_finite"):
        worker = jobs.build(config, init_optimizer=False, init_reference_model=False)
    outcomes = [
        attempt(
            lambda batch=batch: worker.generate(data=BatchedDataDict(batch), greedy=greedy)[
                "output_ids"
            ].tolist()
        )  # type: ignore[misc]
        for batch in batches
    ]
    worker.backend.close()
    return outcomes


@sampled(1)
@pytest.mark.parametrize("greedy", [True, False], ids=["greedy", "sampled"])
@pytest.mark.parametrize(
    ("kind", "world", "options"),
    [
        ("megatron", 1, {}),
        ("megatron", 4, {"tp": 2, "pp": 2, "first": 1, "last": 2}),
        ("megatron", 2, {"cp": 2, "multiple": 4}),
        ("megatron", 2, {"ep": 2}),
        ("dtensor", 2, {"tp": 2}),
        ("fsdp1", 2, {}),
    ],
    ids=str,
)
def test_nan_in_logits_is_an_error_on_all_ranks(
    pool: WorkerPool,
    tiny_models: dict[str, Path],
    mixture: Path,
    tmp_path: Path,
    kind: str,
    world: int,
    options: dict[str, Any],
    greedy: bool,
) -> None:
    model = poisoned(mixture if "ep" in options else tiny_models["qwen2"], tmp_path / "poisoned")
    clean = prompts()
    clean["input_ids"] = clean["input_ids"].where(
        clean["input_ids"] != POISON, torch.full_like(clean["input_ids"], 5)
    )
    bad = {key: value.clone() for key, value in clean.items()}
    bad["input_ids"][4, 0] = POISON
    settings = {"stop_token_ids": [], "top_k": 3}
    config = CONFIG[kind](model, generation=settings, **options)
    first = int(bad["input_lengths"][4])
    for error, after in pool.run(world, generate_twice, kind, config, [bad, clean], greedy):
        assert error.startswith(
            f"GenerationError: row 4: the logits of response token 0 (position {first}) are not finite"
        ), error
        assert isinstance(after, list) and len(after) == len(clean["input_ids"]), after
