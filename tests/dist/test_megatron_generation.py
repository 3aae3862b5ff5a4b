"""Generation by Megatron: greedy equals transformers token for token, its log-probabilities equal get_logprobs, and no layout changes what
is drawn."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.parity.pool import WorkerPool
from tests.dist import jobs, reference
from tests.dist.batches import make_batch
from tests.dist.remembered import remembered
from tests.dist.test_megatron_parity import LAYOUTS as DENSE_LAYOUTS
from tests.models import policy_config
from tests.tiers import newest_megatron, sampled

EOS = 2
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    **DENSE_LAYOUTS,
    "cp2": (2, {"cp": 2, "multiple": 4}),
    "cp2-tp2-sp": (4, {"cp": 2, "tp": 2, "sp": True, "multiple": 8}),
}


def prompts(rows: int = 6, length: int = 9, seed: int = 5) -> dict[str, torch.Tensor]:
    batch = make_batch(rows, length, seed)
    return {
        "input_ids": batch["input_ids"],
        "input_lengths": batch["input_lengths"],
        "sampling_seeds": torch.arange(rows) * 7919 + 11,
    }


@remembered
def transformers_greedy(model: Path, batch: dict[str, torch.Tensor], new_tokens: int, stop: list[int]) -> list[list[int]]:
    """Prompt and answer of each row, one row at a time."""
    return reference.greedy(reference.load(model), batch, new_tokens, stop)


def likely_stop(model: Path, batch: dict[str, torch.Tensor]) -> int:
    """A token that greedy answers do contain, so that stopping happens."""
    answers = transformers_greedy(model, batch, 8, [])
    answer = answers[1][int(batch["input_lengths"][1]) :]
    return answer[3]


@newest_megatron(family=["qwen3"], layout=["tp2-pp2", "cp2-tp2-sp"])
@sampled(4)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", ["llama", "qwen2-tied", "qwen3"])
def test_greedy_equals_transformers(pool: WorkerPool, tiny_models: dict[str, Path], family: str, layout: str) -> None:
    world, changes = LAYOUTS[layout]
    batch = prompts()
    stop = likely_stop(tiny_models[family], batch)
    expected = transformers_greedy(tiny_models[family], batch, 8, [stop])
    assert any(row[-1] == stop for row in expected), "the stop token has to occur for this test to mean anything"
    config = policy_config(tiny_models[family], temperature=0.7, generation={"stop_token_ids": [stop]}, **changes)
    for result in pool.run(world, jobs.generate, config, batch, True):
        assert [row["ids"] for row in result["rows"]] == expected
        check_logprobs(result["rows"])


@sampled(2)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_sampling_is_the_same_in_every_layout(pool: WorkerPool, tiny_models: dict[str, Path], layout: str) -> None:
    world, changes = LAYOUTS[layout]
    settings = {"stop_token_ids": [EOS], "top_k": 20, "top_p": 0.9}
    alone = pool.run(1, jobs.generate, policy_config(tiny_models["qwen3"], temperature=1.3, generation=settings), prompts(), False)[0]
    config = policy_config(tiny_models["qwen3"], temperature=1.3, generation=settings, **changes)
    for result in pool.run(world, jobs.generate, config, prompts(), False):
        assert [row["ids"] for row in result["rows"]] == [row["ids"] for row in alone["rows"]]
        check_logprobs(result["rows"])
    assert len({tuple(row["ids"][-row["new"] :]) for row in alone["rows"]}) > 1


@newest_megatron
def test_an_interleaved_pipeline_generates(pool: WorkerPool, tiny_models: dict[str, Path]) -> None:
    """The last stage hands its first chunk's output back to the first stage's second one."""
    model = tiny_models["qwen3-tied-four"]
    expected = transformers_greedy(model, prompts(), 8, [])
    for result in pool.run(2, jobs.generate, policy_config(model, pp=2, vpp=2, generation={"stop_token_ids": []}), prompts(), True):
        assert [row["ids"] for row in result["rows"]] == expected
        check_logprobs(result["rows"])


RECORDED = {"alone": (1, {}), "tp2": (2, {"tp": 2}), "pp2": (2, {"pp": 2}), "pp2-vpp2": (2, {"pp": 2, "vpp": 2})}


@newest_megatron(layout=["alone"])
@pytest.mark.parametrize("layout", RECORDED)
def test_recorded_steps_give_the_same_answers(pool: WorkerPool, tiny_models: dict[str, Path], layout: str) -> None:
    """Steps depend on nothing but tensors that stay where they are, as a CUDA graph wants it, while rows leave and batches follow one
    another. Alone, no step reads a number from the device, or has a shape that depends on one."""
    world, changes = RECORDED[layout]
    model, batch = tiny_models["qwen3-tied-four" if "pp" in changes else "qwen3"], prompts(11)
    options = {"temperature": 1.3, "generation": {"stop_token_ids": list(range(2, 100, 9)), "max_new_tokens": 20}}
    for greedy in (False, True):
        [plain] = pool.run(1, jobs.generate, policy_config(model, **options), batch, greedy)
        for result in pool.run(world, jobs.generate_recorded, policy_config(model, **options, **changes), batch, greedy):
            assert [row["ids"] for row in result["rows"]] == [row["ids"] for row in plain["rows"]]
            check_logprobs(result["rows"])
            recorded, replayed = result["recorded and replayed"]
            assert replayed > recorded > 1


@newest_megatron
def test_a_recorded_token_takes_few_launches(pool: WorkerPool, tiny_models: dict[str, Path]) -> None:
    """A replay is one. Not recorded, a model of three layers launches ten times as many as are allowed here."""
    config = policy_config(tiny_models["qwen3"], generation={"stop_token_ids": []})
    [operations] = pool.run(1, jobs.operations_of_a_token, config, prompts(4))
    assert operations["recorded"] < 20 < operations["not recorded"] / 5


def check_logprobs(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        torch.testing.assert_close(row["logprobs"], row["recomputed"], atol=1e-5, rtol=0)
        assert row["others"].eq(0).all()
        assert all(token == 0 for token in row["padding"])


def test_total_length_is_bounded(pool: WorkerPool, tiny_models: dict[str, Path]) -> None:
    config = policy_config(tiny_models["qwen3"], generation={"stop_token_ids": []})
    config["max_total_sequence_length"] = 11
    rows = pool.run(1, jobs.generate, config, prompts(), True)[0]["rows"]
    lengths = prompts()["input_lengths"].tolist()
    assert [len(row["ids"]) for row in rows] == [min(11, length + 8) for length in lengths]
