"""Engines on the policy's devices start when it has left them, at a first start and on resume; both are
played, in bytes of a device."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megarl.config.load import load_config
from megarl.config.memory_run import CONTEXT_REST, ENGINE_REST, device_gib, device_ledger, process_rest
from megarl.config.model_facts import read_model_facts
from megarl.config.plan import ledger, memory_of_run
from megarl.config.plugins import EngineMemory
from megarl.config.validate import validate_config
from megarl.models.generation.engines import EngineKind
from megarl.models.generation.vllm.configuration import memory_of_engine
from megarl.run import start
from megarl.run.start import start_engines

CONFIGS = Path(__file__).parents[2] / "configs"
GIB = 2**30
VLLM = CONFIGS / "base" / "vllm.yaml"
COLOCATED = {
    "grpo-qwen2.5-1.5b-1gpu-megatron": (),
    "grpo-qwen2.5-7b-8gpu-megatron": (),
    "grpo-llama3.1-70b-8x8gpu-megatron": ("policy.generation.vllm_cfg.tensor_parallel_size=4",),
}
"""Recipes, with the engine's overrides."""
COMMUNICATORS = {
    "grpo-qwen2.5-1.5b-1gpu-megatron": 0,
    # world, tensor, data, and the ranks of a pipeline stage's tensors
    "grpo-qwen2.5-7b-8gpu-megatron": 4,
    "grpo-llama3.1-70b-8x8gpu-megatron": 5,
}
"""Groups of several ranks of each."""


def colocated(name: str) -> dict[str, Any]:
    return validate_config(load_config(CONFIGS / f"{name}.yaml", COLOCATED[name], [str(VLLM)]))


@dataclass
class Device:
    """A device of two processes.

    Attributes:
        total: bytes that it has.
        used: bytes by process.
        calls: what was asked of policy and engine, in order.
        totals: bytes that both had after each call.
    """

    total: int
    used: dict[str, int] = field(default_factory=dict)
    calls: list[str] = field(default_factory=list)
    totals: list[int] = field(default_factory=list)

    def now(self, call: str, process: str, size: int) -> None:
        self.used[process] = size
        self.calls.append(call)
        self.totals.append(sum(self.used.values()))


class PlayedPolicy:
    """A policy that was just built."""

    def __init__(self, device: Device, built: int, parameters: int, rest: int) -> None:
        self._device, self._parameters, self._rest = device, parameters, rest
        self.worker_group = SimpleNamespace(cluster=SimpleNamespace(use_gpus=True, lost_nodes=list))
        device.now("built", "policy", built)

    def offload_after_refit(self) -> None:
        self._device.now("policy leaves", "policy", self._rest)

    def prepare_for_lp_inference(self) -> None:
        self._device.now("policy returns", "policy", self._parameters)


class PlayedEngine:
    """An engine that starts as vLLM does."""

    def __init__(self, device: Device, budget: int) -> None:
        self._device = device
        free = device.total - sum(device.used.values())
        if free < budget:
            raise RuntimeError(
                f"free memory {free / GIB:.1f} GiB is less than the desired {budget / GIB:.1f} GiB"
            )
        device.now("engine starts", "engine", budget)

    def finish_generation(self) -> bool:
        self._device.now("engine sleeps", "engine", ENGINE_REST)
        return True

    def shutdown(self) -> bool:
        self._device.now("engine ends", "engine", 0)
        return True


def play(monkeypatch: pytest.MonkeyPatch, config: dict[str, Any], resumed: bool) -> tuple[Device, Any]:
    """Start the engines of a run beside a policy that was built; returns the device after the stack was left,
    and the refit."""
    facts = read_model_facts(config["policy"]["model_name"])
    assert facts is not None
    moments = ledger(config, facts, memory_of_run(config)[1])
    engine = memory_of_engine(config, facts)
    device = Device(int(device_gib(config["cluster"]) * GIB))
    policy = PlayedPolicy(device, moments[resumed].policy, moments[3].policy, moments[2].policy)
    kind = EngineKind("played", start=lambda cluster, config: PlayedEngine(device, engine.budget))  # type: ignore[arg-type, return-value]
    monkeypatch.setattr(start, "engine_of", lambda config: kind)
    with ExitStack() as stack:
        refit = start_engines(config, policy, stack)  # type: ignore[arg-type]
    return device, refit


@pytest.mark.parametrize("resumed", [False, True], ids=["first", "resumed"])
@pytest.mark.parametrize("name", COLOCATED)
def test_engines_start_when_the_policy_has_left_and_sleep_before_it_returns(
    monkeypatch: pytest.MonkeyPatch, name: str, resumed: bool
) -> None:
    config = colocated(name)
    device, refit = play(monkeypatch, config, resumed)
    assert device.calls == [
        "built",
        "policy leaves",
        "engine starts",
        "engine sleeps",
        "policy returns",
        "engine ends",
    ]
    assert refit.colocated and refit.stale
    facts = read_model_facts(config["policy"]["model_name"])
    assert facts is not None
    moments = ledger(config, facts, memory_of_run(config)[1])
    built, left, starts, sleeps, back, _ = device.totals
    assert (built, starts, back) == (moments[resumed].total, moments[2].total, moments[3].total)
    rest = process_rest(COMMUNICATORS[name])
    assert (left, sleeps) == (rest, rest + ENGINE_REST)
    assert max(moment.total for moment in moments) < device.total


@pytest.mark.parametrize("name", [name for name in COLOCATED if "1.5b" not in name])
def test_beside_a_resumed_policy_no_engine_would_start(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """What the order is for."""
    monkeypatch.setattr(PlayedPolicy, "offload_after_refit", lambda self: None)
    with pytest.raises(RuntimeError, match=r"is less than the desired 48\.0 GiB"):
        play(monkeypatch, colocated(name), resumed=True)


def test_engines_apart_leave_the_policy_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    config = colocated("grpo-qwen2.5-7b-8gpu-megatron")
    monkeypatch.setattr(start, "generation_shape", lambda view: (1, 8))
    cluster = SimpleNamespace(shutdown=lambda: None, lost_nodes=list)
    monkeypatch.setattr(
        "megarl.distributed.virtual_cluster.RayVirtualCluster", lambda *args, **kwargs: cluster
    )
    device, refit = play(
        monkeypatch, {**config, "cluster": {**config["cluster"], "device_memory_gib": 1000.0}}, resumed=True
    )
    assert device.calls == ["built", "engine starts", "engine ends"] and not refit.colocated


GIB_BY_MOMENT = {
    # policy built at a first start and resumed, engine starts, sleeps, refit, generation, log-probabilities,
    # training
    "grpo-qwen2.5-1.5b-1gpu-megatron": [15.4, 26.9, 49.0, 5.9, 10.2, 50.0, 11.5, 49.1],
    "grpo-qwen2.5-7b-8gpu-megatron": [26.7, 33.8, 49.9, 11.0, 28.2, 51.9, 15.3, 57.4],
    "grpo-llama3.1-70b-8x8gpu-megatron": [30.8, 39.0, 50.1, 12.3, 51.0, 54.0, 16.5, 56.1],
}


@pytest.mark.parametrize("name", COLOCATED)
def test_the_ledger_of_the_recipes(name: str) -> None:
    config = colocated(name)
    facts = read_model_facts(config["policy"]["model_name"])
    assert facts is not None
    totals = [moment.total / GIB for moment in ledger(config, facts, memory_of_run(config)[1])]
    assert totals == pytest.approx(GIB_BY_MOMENT[name], abs=0.05)


def test_the_ledger_by_hand() -> None:
    """Of 7.6 billion parameters over two tensor-parallel ranks and four data-parallel ones."""
    config = colocated("grpo-qwen2.5-7b-8gpu-megatron")
    facts = read_model_facts("Qwen/Qwen2.5-7B")
    assert facts is not None
    [rank] = memory_of_run(config)[1]
    engine = EngineMemory(weights=15 * GIB, budget=48 * GIB, token=1, share="")
    first, resumed, starts, sleeps, refit, generation, logprobs, training = device_ledger(
        config["policy"], rank, engine, facts
    )
    share = -(-rank.parameters // 4)
    assert (
        resumed.total == CONTEXT_REST + 6 * rank.parameters + rank.optimizer
        and abs(rank.optimizer - 12 * share) < 12
    )
    # two moments of three float32 numbers
    assert abs(resumed.total - first.total - 8 * share) < 12
    vocabulary = 152_064 * 3584 * 2
    assert (starts.total, sleeps.total) == (
        CONTEXT_REST + 48 * GIB,
        CONTEXT_REST + 2 * rank.parameters + ENGINE_REST,
    )
    assert refit.total == sleeps.total + 15 * GIB + 3 * vocabulary
    assert generation.total == starts.total + 2 * vocabulary
    assert logprobs.total == sleeps.total + rank.scoring + 2 * vocabulary
    assert training.total == CONTEXT_REST + rank.peak + ENGINE_REST + 2 * vocabulary
    # each buffer holds the largest weight, whatever is configured
    for size, buffers in ((0.25, 2 * vocabulary), (8.0, 8 * GIB)):
        fixed = device_ledger({**config["policy"], "refit_buffer_size_gb": size}, rank, engine, facts)
        assert (fixed[4].transfer, fixed[5].transfer) == (buffers + vocabulary, buffers)


def test_policies_that_generate_have_no_ledger() -> None:
    config = colocated("grpo-qwen2.5-7b-8gpu-megatron")
    facts = read_model_facts("Qwen/Qwen2.5-7B")
    assert facts is not None
    ranks = memory_of_run(config)[1]
    generation = {**config["policy"]["generation"], "backend": "megatron"}
    assert ledger({**config, "policy": {**config["policy"], "generation": generation}}, facts, ranks) == []
