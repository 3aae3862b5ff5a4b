"""The fast and the plain paths of the fuzzer: each is really taken, and leaves nothing behind."""

from __future__ import annotations

import importlib.util
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from megarl import env
from megarl.models.engine import attention as engine
from megarl.models.engine.attention import SequenceLayout, attention, runs_of, varlen_attention
from megarl.models.engine.kernels import kernels
from megarl.models.engine.worker import EngineWorker
from megarl.models.megatron import adam, cached_attention, settings
from megarl.models.megatron.rotary import Rotation, rotate, rotation
from megarl.parity import paths
from megarl.parity.case import PATHS, Case
from megarl.parity.losses import make_loss
from tests.unit.test_varlen_attention import slow_kernel

CPU = torch.device("cpu")


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("window", [None, 1, 3])
@pytest.mark.parametrize(("rank", "ranks"), [(0, 1), (0, 2), (1, 2)])
def test_the_attention_of_runs_is_that_of_a_kernel(rank: int, ranks: int, window: int | None) -> None:
    starts = (0, 4, 12, 16)
    query, key, value = (
        normal(1, 4, 16 // ranks, 6, seed=1),
        normal(1, 2, 16, 6, seed=2),
        normal(1, 2, 16, 6, seed=3),
    )
    runs = runs_of(starts, 1, rank, ranks, CPU)
    found = [
        varlen_attention(query, key, value, runs, kernel, scale=0.3, window=window)
        for kernel in (paths.attention_of_runs, slow_kernel)
    ]
    torch.testing.assert_close(found[0], found[1], atol=2e-6, rtol=1e-5)


def test_rotations_and_their_gradients_are_equal() -> None:
    by: Rotation = rotation(
        normal(9, 1, 1, 3).repeat(1, 1, 1, 2), torch.tensor([4, 0, 8]), torch.float32, 1.3
    )
    tensor, found = normal(3, 1, 2, 10), []
    for turn in (rotate, paths.rotated):
        leaf = tensor.clone().requires_grad_()
        turned = turn(leaf, by)
        (turned * normal(*tensor.shape, seed=4)).sum().backward()
        found.append((turned.detach(), leaf.grad))
    torch.testing.assert_close(found[0], found[1], atol=1e-6, rtol=1e-6)


def state() -> list[Any]:
    """What paths replace, and the environment."""
    owners = [
        (engine, "serves"),
        (engine, "varlen_kernel"),
        (cached_attention, "rotate"),
        (settings, "compiles"),
        (adam, "adamw"),
    ]
    return [*(vars(owner)[name] for owner, name in owners), vars(EngineWorker)["__init__"], env.snapshot()]


@pytest.mark.parametrize("backend", ["megatron", "dtensor", "fsdp1"])
@pytest.mark.parametrize("way", PATHS)
def test_a_way_is_taken_and_left(way: str, backend: str) -> None:
    before = state()
    with paths.taken(Case(backend=backend, paths=way)):
        inside = state()
        assert (engine.varlen_kernel() is paths.attention_of_runs) is (way == "fast")
        assert (cached_attention.rotate is paths.rotated) is (way == "plain")
        assert (EngineWorker.__init__ is before[-2]) is (way == "fast")
        if backend == "megatron":
            assert (settings.compiles(), adam.adamw is before[4]) == (
                (True, True) if way == "fast" else (False, False)
            )
        has_triton = importlib.util.find_spec("triton") is not None
        for module, variable in zip(("logprob_kernels", "gated_delta_kernels"), paths.KERNELS, strict=True):
            assert (kernels(module, variable, "cpu") is not None) is (way == "fast" and has_triton)
        assert inside != before
    assert state() == before


def test_packed_rows_go_to_the_kernel_that_is_played(monkeypatch: pytest.MonkeyPatch) -> None:
    query, key, value = normal(1, 4, 16, 6, seed=1), normal(1, 2, 16, 6, seed=2), normal(1, 2, 16, 6, seed=3)
    layout, played, results = SequenceLayout((0, 4, 12, 16)), [], {}

    def noted(*arguments: Any, **options: Any) -> Tensor:
        played.append(way)
        return original(*arguments, **options)

    original = paths.attention_of_runs
    monkeypatch.setattr(paths, "attention_of_runs", noted)
    for way in PATHS:
        with paths.taken(Case(paths=way)):
            results[way] = attention(query, key, value, layout)
    assert played == ["fast"]
    torch.testing.assert_close(results["fast"], results["plain"], atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("loss", ["nll", "pg", "dpo"])
def test_a_loss_of_the_plain_paths_gets_every_position(loss: str) -> None:
    assert (
        make_loss(Case(loss=loss)).skips_masked and not make_loss(Case(loss=loss, paths="plain")).skips_masked
    )
    assert make_loss(Case(loss=loss, precision="float16")).skips_masked


def test_torch_backends_go_the_long_way() -> None:
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(2))], fused=True)
    worker = SimpleNamespace(
        backend=SimpleNamespace(optimizer=optimizer, _stays_whole=True, _reduces_once=True)
    )
    paths._plain_worker(worker, Case(backend="fsdp1", paths="plain"))
    assert worker.backend._stays_whole and not optimizer.param_groups[0]["fused"]
    paths._plain_worker(worker, Case(backend="dtensor", paths="plain"))
    assert not worker.backend._stays_whole and not worker.backend._reduces_once
