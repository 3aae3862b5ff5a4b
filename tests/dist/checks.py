"""What tests of all backends and families assert alike."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megarl.parity.pool import WorkerPool
from tests.dist import jobs, reference
from tests.dist.batches import make_batch
from tests.dist.remembered import remembered, without_layout

Weights = Mapping[str, Tensor]
TRAINERS = {
    "language": reference.ReferenceTrainer,
    "scoring": reference.ScoringTrainer,
    "distillation": reference.DistillationTrainer,
}


@remembered
def _reference(
    model: Path, config: dict[str, Any], batches: list[dict[str, Tensor]], loss_fn: Any, kind: str
) -> Any:
    # of a gradient that cancels, float32 leaves noise, which Adam makes a step of: the reference alone was
    # 1e-5 off where it had one
    load = reference.load_scoring if kind == "scoring" else reference.load
    trainer = TRAINERS[kind](load(model).double(), config)
    exact = [
        {name: column.double() if column.is_floating_point() else column for name, column in batch.items()}
        for batch in batches
    ]
    measured = [trainer.step(batch, loss_fn) for batch in exact]
    weights = dict(trainer.model.state_dict())
    if kind != "scoring" and trainer.model.config.tie_word_embeddings:
        del weights["lm_head.weight"]
    return [m[0] for m in measured], [m[1] for m in measured], weights


def run_reference(
    model: Path,
    config: Mapping[str, Any],
    batches: list[dict[str, Tensor]],
    loss_fn: Any,
    *,
    kind: str = "language",
) -> tuple[list[float], list[float], dict[str, Tensor]]:
    """Losses, gradient norms and the weights of transformers after one step for each batch, computed once for
    all layouts.

    Args:
        model: Hugging Face directory.
        config: ``policy_config``, of which the layout does not count.
        batches: to train on.
        loss_fn: one of megarl's.
        kind: of model and loss: one of ``TRAINERS``.
    """
    found: tuple[list[float], list[float], dict[str, Tensor]] = _reference(
        model, without_layout(config), batches, loss_fn, kind
    )
    return found


def check_trained(
    results: Iterable[Mapping[str, Any]], losses: list[float], norms: list[float], weights: Weights
) -> None:
    """What every rank returned of ``jobs.train`` equals the reference."""
    for result in results:
        torch.testing.assert_close(result["losses"], losses, atol=1e-6, rtol=1e-5)
        torch.testing.assert_close(result["norms"], norms, atol=1e-6, rtol=1e-5)
        assert result["weights"].keys() == weights.keys()
        check_close(result["weights"], weights)


def check_close(weights: Weights, expected: Weights) -> None:
    """Every tensor is as expected, but for rounding in float32."""
    for name, tensor in expected.items():
        difference = (weights[name] - tensor).norm()
        assert difference <= 1e-5 * tensor.norm(), (
            f"{name}: relative difference {difference / tensor.norm():.2e}"
        )


def check_equal(weights: Weights, expected: Weights) -> None:
    """Names and bits are the same."""
    assert weights.keys() == expected.keys()
    assert [name for name, tensor in expected.items() if not torch.equal(weights[name], tensor)] == []


# generation


def prompts(rows: int = 6, length: int = 9, seed: int = 5) -> dict[str, Tensor]:
    batch = make_batch(rows, length, seed)
    return {
        "input_ids": batch["input_ids"],
        "input_lengths": batch["input_lengths"],
        "sampling_seeds": torch.arange(rows) * 7919 + 11,
    }


@remembered
def transformers_greedy(
    model: Path, batch: dict[str, Tensor], new_tokens: int, stop: list[int]
) -> list[list[int]]:
    """Prompt and answer of each row, one row at a time."""
    return reference.greedy(reference.load(model), batch, new_tokens, stop)


def likely_stop(model: Path, batch: dict[str, Tensor]) -> int:
    """A token that greedy answers do contain, so that stopping happens."""
    answers = transformers_greedy(model, batch, 8, [])
    answer = answers[1][int(batch["input_lengths"][1]) :]
    return answer[3]


def check_generated(
    pool: WorkerPool,
    world: int,
    config: Mapping[str, Any],
    batch: Mapping[str, Any],
    greedy: bool,
    expected: list[list[int]],
) -> None:
    """All ranks return the expected tokens, with the log-probabilities that get_logprobs gives them."""
    for rows in pool.run(world, jobs.generate, config, batch, greedy):
        check_rows(rows, expected)


def check_recorded(
    pool: WorkerPool,
    world: int,
    config: Mapping[str, Any],
    batch: Mapping[str, Any],
    greedy: bool,
    expected: list[list[int]],
) -> None:
    """The same of steps that are recorded, of which the last call still replays some."""
    for rows, (recorded, replayed) in pool.run(world, jobs.generate_recorded, config, batch, greedy):
        check_rows(rows, expected)
        assert replayed > recorded > 1


def check_rows(rows: list[dict[str, Any]], expected: list[list[int]]) -> None:
    assert tokens_of(rows) == expected
    for row in rows:
        torch.testing.assert_close(row["logprobs"], row["recomputed"], atol=1e-5, rtol=0)
        assert row["others"].eq(0).all()
        assert all(token == 0 for token in row["padding"])


def tokens_of(rows: list[dict[str, Any]]) -> list[list[int]]:
    return [row["ids"] for row in rows]


# checkpoints


def check_resumed(
    pool: WorkerPool,
    save: Callable[..., Any],
    resume: Callable[..., Any],
    written: tuple[int, Mapping[str, Any]],
    read: tuple[int, Mapping[str, Any]],
    directory: Path,
) -> None:
    """A run goes on as the undisturbed one: bit for bit in the same layout, within rounding in another.

    Args:
        pool: of ranks.
        save, resume: jobs that train on with ``written`` and ``read``.
        written, read: ranks and configuration.
        directory: of the checkpoint.
    """
    undisturbed = pool.run(written[0], save, written[1], directory)[0]
    resumed = pool.run(read[0], resume, read[1], directory, False)[0]
    if written == read:
        assert resumed["measured"] == undisturbed["measured"]
        check_equal(resumed["weights"], undisturbed["weights"])
    torch.testing.assert_close(resumed["measured"], undisturbed["measured"], atol=1e-6, rtol=1e-5)
    check_close(resumed["weights"], undisturbed["weights"])
