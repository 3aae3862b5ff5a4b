"""The actor of an engine, without vLLM: its engine is played. GPUs of its place, caches of older weights,
seeds, how megarl is found."""

from __future__ import annotations

import importlib.metadata
import multiprocessing
import signal
import sys
import tempfile
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from megarl import env
from megarl.distributed.batched_data_dict import BatchedDataDict
from megarl.errors import ConfigError, RefitError
from megarl.models.generation.vllm import plugin, worker
from megarl.models.generation.vllm.options import completed
from megarl.models.generation.vllm.worker import VllmGenerationWorker

LEAST = {
    "max_new_tokens": 3,
    "model_name": "owner/a-model-that-is-on-no-disk",
    "pad_token_id": 0,
    "stop_token_ids": [2],
}
PROMPTS = BatchedDataDict(
    {
        "input_ids": torch.tensor([[5, 6], [7, 0]]),
        "input_lengths": torch.tensor([2, 1]),
        "sampling_seeds": torch.tensor([-3, 8]),
    }
)


class PlayedEngine:
    """Answers as ``vllm.LLM`` of one rank; what it was asked for is noted."""

    calls: list[tuple[Any, ...]]

    def __init__(self, options: dict[str, Any]) -> None:
        self.calls = [("start", env.text("CUDA_VISIBLE_DEVICES"))]
        self.version, self.forgets, self.has_sleep_mode = 4, True, True

    def call(self, method: str, *arguments: Any, **named: Any) -> Any:
        self.calls.append((method, *arguments[:1], *named.get("args", ())[:1]))
        if arguments == ("megarl_weights_version",):
            return [self.version]
        if method == "collective_rpc":
            return [None]
        if method in {"generate", "enqueue"}:
            self.seeds, self.options = [options["seed"] for options in arguments[1]], arguments[1]
        if method in {"generate", "wait_for_completion"}:
            answer = SimpleNamespace(token_ids=[9], logprobs=None, finish_reason="stop")
            return [SimpleNamespace(outputs=[answer]) for _ in self.seeds]
        return self.forgets


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray says that the actor has GPU 6, and has left the variable alone."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5,6,7")
    monkeypatch.setattr(worker, "Engine", PlayedEngine)
    monkeypatch.setattr(worker, "runtime", lambda: SimpleNamespace(is_cuda=True))
    monkeypatch.setattr(plugin, "register", lambda: None)
    monkeypatch.setattr(
        worker.ray, "get_runtime_context", lambda: SimpleNamespace(get_accelerator_ids=lambda: {"GPU": ["6"]})
    )
    monkeypatch.setattr(worker.ray.util, "get_current_placement_group", lambda: None)
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(SamplingParams=dict))


def made(**settings: Any) -> VllmGenerationWorker:
    settings = {"max_model_len": 64, "precision": "bfloat16", **settings}
    return VllmGenerationWorker(completed({**LEAST, "vllm_cfg": settings}), place=(5, 0.5))


def calls_of(one: VllmGenerationWorker) -> list[tuple[Any, ...]]:
    assert isinstance(one._engine, PlayedEngine)
    return one._engine.calls


def refitted(**settings: Any) -> VllmGenerationWorker:
    one = made(**settings)
    one.connect([["weight", [2], "float32"]], None)
    assert one.update_from_handles({"GPU-6": {"first": 0, "count": 1}}) == 4
    return one


def test_a_refit_by_itself_is_one_update_of_the_engine(gpus: None) -> None:
    one = made()
    one.connect([["weight", [2], "float32"]], None)
    one.meet({"GPU-6": {}}, 5)
    before = len(calls_of(one))
    assert one.update_from_policy(77) == 4
    asked = ["start_weight_update", "update_weights", "finish_weight_update"]
    assert [call[2] for call in calls_of(one)[before:] if call[1:2] == ("megarl_call",)] == asked


def test_ranks_of_an_engine_that_fails_refuse_the_refit_they_were_asked_for(
    gpus: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever of the calls fails, also where a rank had not begun."""
    for failing in ("start_weight_update", "update_weights", "finish_weight_update"):
        one = refitted()
        told: list[tuple[str, dict[str, Any]]] = []

        def call(method: str, *arguments: Any, failing: str = failing, told: Any = told, **named: Any) -> Any:
            told.append(named["args"])
            return [("out of memory", True, "")] if named["args"][0] == failing else [None]

        monkeypatch.setattr(one._engine, "call", call)
        with pytest.raises(RefitError, match="the engine did not take the weights: out of memory"):
            one.update_from_policy(77)
        assert told[-1] == ("megarl_refuse", {"ticket": 77})
        assert ("update_weights", {"update_info": {"given_up": True}}) in told
        with pytest.raises(RefitError, match="the engine has the weights of version None"):
            one.generate(PROMPTS, greedy=False, version=4)


def test_an_engine_of_one_rank_sees_the_gpu_of_its_place_alone(gpus: None) -> None:
    assert calls_of(made()) == [("start", "6")]


def test_an_engine_of_two_ranks_without_places_is_refused(gpus: None) -> None:
    config = completed(
        {**LEAST, "vllm_cfg": {"max_model_len": 64, "precision": "bfloat16", "pipeline_parallel_size": 2}}
    )
    with pytest.raises(ConfigError, match="an engine of 2 ranks on GPUs has no bundles"):
        VllmGenerationWorker(config)


@pytest.mark.parametrize("key", ["pipeline_parallel_size", "expert_parallel_size"])
def test_an_engine_on_a_cpu_that_vllm_cannot_run_is_refused(
    gpus: None, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    monkeypatch.setattr(worker, "runtime", lambda: SimpleNamespace(is_cuda=False))
    config = completed({**LEAST, "vllm_cfg": {"max_model_len": 64, "precision": "bfloat16", key: 2}})
    with pytest.raises(ConfigError, match=rf"{key} = 2: vLLM 0\.32 for CPUs"):
        VllmGenerationWorker(config, place=(5, 0))


def test_keys_and_values_of_older_weights_are_forgotten_before_the_engine_has_a_version(gpus: None) -> None:
    one = refitted()
    finish = calls_of(one).index(("collective_rpc", "megarl_call", "finish_weight_update"))
    assert calls_of(one)[finish:] == [
        ("collective_rpc", "megarl_call", "finish_weight_update"),
        ("collective_rpc", "megarl_weights_version"),
        ("reset_prefix_cache",),
    ]
    one._engine.forgets = False  # type: ignore[attr-defined]
    with pytest.raises(RefitError, match="keeps keys and values of the older weights"):
        one.update_from_handles({"GPU-6": {"first": 0, "count": 1}})
    with pytest.raises(RefitError, match="the engine has the weights of version None"):
        one.generate(PROMPTS, greedy=False, version=4)


@pytest.mark.parametrize(
    ("fast", "greedy", "calls", "seeds"),
    [
        (False, False, ["generate"], [2**63 - 3, 8]),
        (True, False, ["sleep", "collective_rpc", "enqueue", "wake_up", "wait_for_completion"], [None, None]),
        (True, True, ["generate"], [None, None]),
    ],
    ids=["an answer", "an engine", "greedy"],
)
def test_seeds_are_those_of_the_rows_or_one_for_the_engine(
    gpus: None, fast: bool, greedy: bool, calls: list[str], seeds: list[Any]
) -> None:
    one = refitted(fast_sampling=fast)
    before = len(calls_of(one))
    output = one.generate(PROMPTS, greedy=greedy, version=4)
    asked = calls_of(one)[before:]
    assert [call[0] for call in asked] == calls
    assert [call[1:] for call in asked if call[0] == "collective_rpc"] == [("megarl_seed", 2**63 - 3)] * (
        len(calls) > 1
    )
    assert [call[1:] for call in asked if call[0] == "wake_up"] == [(["scheduling"],)] * (len(calls) > 1)
    assert one._engine.seeds == seeds  # type: ignore[attr-defined]
    assert output["generation_lengths"].tolist() == [1, 1]


def test_megarl_that_is_on_the_path_alone_is_refused(gpus: None, monkeypatch: pytest.MonkeyPatch) -> None:
    made()
    other = importlib.metadata.EntryPoint("other", "other.plugin:register", plugin.GROUP)
    monkeypatch.setattr(
        importlib.metadata, "entry_points", lambda group: [other] if group == plugin.GROUP else []
    )
    with pytest.raises(
        ConfigError, match=r"no installed distribution has megarl's entry point in vllm\.general_plugins"
    ):
        made()


def test_a_validation_draws_otherwise_than_training(gpus: None) -> None:
    one = refitted()
    for sampling, expected in (
        (None, (1.0, 0, 1.0)),
        ({"temperature": 0.6, "top_p": 0.9, "top_k": 5}, (0.6, 5, 0.9)),
    ):
        one.generate(PROMPTS, greedy=False, version=4, sampling=sampling)
        asked = [
            tuple(options[name] for name in ("temperature", "top_k", "top_p"))
            for options in one._engine.options
        ]  # type: ignore[attr-defined]
        assert asked == [expected] * 2


def test_an_engine_ends_all_its_processes_though_one_ends_by_itself_meanwhile() -> None:
    def break_off() -> None:
        raise psutil.NoSuchProcess(1)

    process = multiprocessing.get_context("spawn").Process(target=signal.pause)
    process.start()
    engine = worker.Engine.__new__(worker.Engine)
    engine._sockets, engine._processes = tempfile.TemporaryDirectory(), [process]
    core = SimpleNamespace(engine_core=SimpleNamespace(shutdown=break_off))
    engine._llm = SimpleNamespace(llm_engine=core, shutdown_weight_transfer_engine=lambda: None)
    engine.shutdown()
    process.join()
    assert process.exitcode == -signal.SIGKILL
