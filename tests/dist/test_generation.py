"""Generation by the three backends: greedy equals transformers token for token, log-probabilities equal
get_logprobs, no layout changes what is sampled, recorded steps give the same, and every way to stop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megarl.parity.pool import WorkerPool
from tests.dist import jobs
from tests.dist.checks import (
    check_generated,
    check_recorded,
    likely_stop,
    prompts,
    tokens_of,
    transformers_greedy,
)
from tests.dist.layouts import DTENSOR, configured, over
from tests.models import policy_config
from tests.tiers import newest_megatron, sampled

MEGATRON = "tp1 tp2 tp2-sp pp2-uneven dp2 tp2-pp2 tp2-dp2 cp2 cp2-tp2-sp"
FSDP1 = "dp1 dp2 dp3"
OFTEN = {"stop_token_ids": list(range(2, 100, 9)), "max_new_tokens": 20}


def alone(
    pool: WorkerPool, model: Path, batch: dict[str, Any], greedy: bool = True, **changes: Any
) -> list[dict[str, Any]]:
    """Rows of one rank of Megatron, eight tokens each where nothing else is said."""
    generation = {"stop_token_ids": [], **changes.pop("generation", {})}
    rows: list[dict[str, Any]] = pool.run(
        1, jobs.generate, policy_config(model, generation=generation, **changes), batch, greedy
    )[0]
    return rows


@newest_megatron(family=["qwen3"], backend=["megatron"], layout=["tp2-pp2", "cp2-tp2-sp"])
@sampled(7)
@pytest.mark.parametrize("family", ["llama", "qwen2-tied", "qwen3"])
@over(megatron=MEGATRON, dtensor=DTENSOR, fsdp1=FSDP1)
def test_greedy_equals_transformers(
    pool: WorkerPool, tiny_models: dict[str, Path], backend: str, layout: str, family: str
) -> None:
    model, batch = tiny_models[family], prompts()
    stop = likely_stop(model, batch)
    expected = transformers_greedy(model, batch, 8, [stop])
    assert any(row[-1] == stop for row in expected), (
        "the stop token has to occur for this test to mean anything"
    )
    world, config = configured(backend, layout, model, temperature=0.7, generation={"stop_token_ids": [stop]})
    check_generated(pool, world, config, batch, True, expected)


@sampled(5)
@over(False, megatron=MEGATRON, dtensor=DTENSOR, fsdp1="dp1 dp2")
def test_sampling_is_the_same_in_every_layout(
    pool: WorkerPool, tiny_models: dict[str, Path], backend: str, layout: str
) -> None:
    changes = {"temperature": 1.3, "generation": {"stop_token_ids": [2], "top_k": 20, "top_p": 0.9}}
    model, batch = tiny_models["qwen3"], prompts()
    rows = alone(pool, model, batch, False, **changes)
    check_generated(pool, *configured(backend, layout, model, **changes), batch, False, tokens_of(rows))
    assert len({tuple(row["ids"][-row["new"] :]) for row in rows}) > 1


@newest_megatron
def test_an_interleaved_pipeline_generates(pool: WorkerPool, tiny_models: dict[str, Path]) -> None:
    """The last stage hands its first chunk's output back to the first stage's second one."""
    model = tiny_models["qwen3-tied-four"]
    world, config = configured("megatron", "pp2-vpp2", model, generation={"stop_token_ids": []})
    check_generated(pool, world, config, prompts(), True, transformers_greedy(model, prompts(), 8, []))


@newest_megatron(backend=["megatron"], layout=["tp1"])
@over(megatron="tp1 tp2 pp2 pp2-vpp2", dtensor="dp1 tp2 cp2", fsdp1="dp1 dp2")
def test_recorded_steps_give_the_same_answers(
    pool: WorkerPool, tiny_models: dict[str, Path], backend: str, layout: str
) -> None:
    """Steps depend on nothing but tensors that stay where they are, as a CUDA graph wants it, while rows
    leave and batches follow one another. On one rank, no step reads a number from the device, or has a shape
    that depends on one."""
    model, batch = tiny_models["qwen3-tied-four" if "vpp" in layout else "qwen3"], prompts(11)
    options = {"temperature": 1.3, "generation": OFTEN}
    for greedy in (False, True) if backend == "megatron" else (False,):
        expected = tokens_of(alone(pool, model, batch, greedy, **options))
        check_recorded(pool, *configured(backend, layout, model, **options), batch, greedy, expected)


@newest_megatron
def test_a_recorded_token_takes_few_launches(pool: WorkerPool, tiny_models: dict[str, Path]) -> None:
    """A replay is one. Not recorded, a model of three layers launches ten times as many as are allowed
    here."""
    config = policy_config(tiny_models["qwen3"], generation={"stop_token_ids": []})
    [operations] = pool.run(1, jobs.operations_of_a_token, config, prompts(4))
    assert operations["recorded"] < 20 < operations["not recorded"] / 5


@sampled(2)
@pytest.mark.parametrize("greedy", [True, False])
@over(megatron="dp4-overlap", fsdp1="dp3")
def test_more_replicas_than_prompts(
    pool: WorkerPool, tiny_models: dict[str, Path], backend: str, layout: str, greedy: bool
) -> None:
    model = tiny_models["qwen3"]
    rows = 3 if backend == "megatron" else 4
    expected = tokens_of(alone(pool, model, prompts(rows), greedy))
    world, config = configured(backend, layout, model, generation={"stop_token_ids": []})
    check_generated(pool, world, config, prompts(rows), greedy, expected)


# ends of answers


class Letters:
    """A tokenizer whose token n is one character."""

    def decode(self, tokens: list[int], skip_special_tokens: bool = False) -> str:
        return "".join(chr(200 + token) for token in tokens)


@sampled(2)
@over(megatron="tp1 dp2 pp2", fsdp1="dp2")
def test_stop_strings_of_rows_and_of_the_configuration(
    pool: WorkerPool, tiny_models: dict[str, Path], backend: str, layout: str
) -> None:
    model, batch = tiny_models["qwen3"], prompts()
    answers = [row["ids"][-row["new"] :] for row in alone(pool, model, batch)]
    text = [Letters().decode(answer) for answer in answers]
    batch["stop_strings"] = [[text[0][1:3]], None, [text[2][4]], ["no such text"], text[4][0], []]
    common = [text[5][2:4]]
    ends = []
    for whole, own in zip(text, batch["stop_strings"], strict=True):
        stops = [*([own] if isinstance(own, str) else own or []), *common]
        ends.append(next((end for end in range(1, 9) if any(stop in whole[:end] for stop in stops)), None))
    assert len(set(ends)) > 2
    world, config = configured(
        backend, layout, model, generation={"stop_token_ids": [], "stop_strings": common}
    )
    for rows in pool.run(world, jobs.generate, config, batch, True, Letters()):
        assert [row["ids"][-row["new"] :] for row in rows] == [
            answer[:end] for answer, end in zip(answers, ends, strict=True)
        ]
        assert [row["truncated"] for row in rows] == [end is None for end in ends]


@sampled(2)
@pytest.mark.parametrize(("new", "limit"), [(1, 64), (5, 9), (3, 10), (8, 11)])
@over(megatron="tp1 tp2-sp pp2")
def test_length_limits(
    pool: WorkerPool, tiny_models: dict[str, Path], backend: str, layout: str, new: int, limit: int
) -> None:
    """A prompt of the full length has an empty answer; one token is the least that is asked for."""
    model, batch = tiny_models["qwen3"], prompts(length=9)
    world, config = configured(
        backend, layout, model, generation={"stop_token_ids": [], "max_new_tokens": new}
    )
    config["max_total_sequence_length"] = limit
    lengths = [length + min(new, limit - length) for length in batch["input_lengths"].tolist()]
    expected = [row["ids"][:length] for row, length in zip(alone(pool, model, batch), lengths, strict=True)]
    check_generated(pool, world, config, batch, True, expected)
