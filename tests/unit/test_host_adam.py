"""Adam in host memory: the slices that go through are stepped as the whole is on the device, to the bit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from megarl.models.engine import host_adam, low_precision_adam
from megarl.models.engine.host_adam import HostAdam, HostMemory
from megarl.models.engine.low_precision_adam import MOMENTS, Hyperparameters, Shard, StateSettings, step_shard
from megarl.models.engine.state_formats import BLOCK

CPU = torch.device("cpu")
COUNTS = (5 * BLOCK + 3, 7, 2 * BLOCK, 0, BLOCK + 1)


def shards(settings: StateSettings, precision: torch.dtype) -> list[Shard]:
    """Of several sizes; the same ones each time."""
    generator = torch.Generator().manual_seed(1)
    found = []
    for number, count in enumerate(COUNTS):
        weights = torch.randn(count, generator=generator).to(precision)
        moments = {name: settings.format_of(name).zeros(count, CPU) for name in MOMENTS}
        found.append(
            Shard(
                f"{number}", 3, weights, torch.empty(count, dtype=precision), moments, weights.float().clone()
            )
        )
    return found


@pytest.mark.parametrize("formats", [("float32", "float32"), ("8bit", "bfloat16")], ids=str)
@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [BLOCK, 3 * BLOCK, 2**20])
def test_slices_are_stepped_as_the_whole(
    formats: tuple[str, str], precision: torch.dtype, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_adam, "SLICE", size)
    settings = StateSettings("float32", *formats, seed=2)
    one, other = shards(settings, precision), shards(settings, precision)
    adam, generator = HostAdam(CPU), torch.Generator().manual_seed(3)
    for step in range(1, 5):
        numbers = Hyperparameters(
            0.02, (0.9, 0.95), 1e-8, 0.1, step, gradient_factor=0.7 if step % 2 else 1.0
        )
        for mine, theirs in zip(one, other, strict=True):
            mine.gradient.copy_(torch.randn(mine.gradient.shape, generator=generator))
            theirs.gradient.copy_(mine.gradient)
            step_shard(theirs, settings, numbers)
        before = [shard.gradient.clone() for shard in one]
        adam.step([(shard, numbers) for shard in one], settings)
        assert all(torch.equal(shard.gradient, gradient) for shard, gradient in zip(one, before, strict=True))
    for mine, theirs in zip(one, other, strict=True):
        assert (
            mine.master is not None and theirs.master is not None and torch.equal(mine.master, theirs.master)
        )
        assert torch.equal(mine.weights, theirs.weights)
        assert all(torch.equal(mine.moments[name], theirs.moments[name]) for name in MOMENTS)


def test_a_step_in_the_thread_raises_whenever_its_weights_are_wanted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What is not in host memory yet is stepped by then."""
    settings, numbers = StateSettings(), Hyperparameters(0.02, (0.9, 0.95), 1e-8, 0.1, 1)
    late, early = shards(settings, torch.float32)[:2]
    late.gradient.fill_(1.0)
    before, step = late.weights.clone(), host_adam.step_slice

    def failing(shard: Shard, *arguments: Any) -> None:
        if shard.is_early:
            raise MemoryError("in the thread")
        step(shard, *arguments)

    monkeypatch.setattr(host_adam, "step_slice", failing)
    adam = HostAdam(CPU)
    adam.start([(replace(early, is_early=True), numbers), (late, numbers)], settings)
    assert not torch.equal(late.weights, before)
    for _ in range(2):
        with pytest.raises(MemoryError, match="in the thread"):
            adam.finish()


def test_slices_of_a_device_are_stepped_as_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = StateSettings("bfloat16", "8bit", "8bit", seed=2)
    numbers = Hyperparameters(0.02, (0.9, 0.95), 1e-8, 0.1, 1)
    found = []
    for size in (BLOCK, 2 * BLOCK, 2**20):
        monkeypatch.setattr(low_precision_adam, "SLICES", {"cpu": size})
        shard = shards(settings, torch.bfloat16)[0]
        shard.gradient.copy_(shard.weights.sin())
        step_shard(
            Shard(shard.name, 0, shard.weights, shard.gradient, shard.moments, None), settings, numbers
        )
        found.append([shard.weights, *shard.moments.values()])
    assert all(torch.equal(*pair) for other in found[1:] for pair in zip(found[0], other, strict=True))


def test_host_memory_is_taken_from_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_adam, "_PINNED_BLOCK", 4096)
    memory, made = HostMemory(pin=False), []
    for count, dtype in (
        (100, torch.float32),
        (33, torch.uint8),
        (700, torch.bfloat16),
        (5000, torch.uint8),
        (9, torch.float32),
    ):
        tensor = memory.zeros_like(torch.empty(count, dtype=dtype, device="meta"))
        assert (
            tensor.shape == (count,)
            and tensor.dtype is dtype
            and not tensor.any()
            and tensor.data_ptr() % 4 == 0
        )
        made.append(tensor.fill_(len(made) + 1))
    assert all((tensor == number).all() for number, tensor in enumerate(made, 1))
    assert len({tensor.untyped_storage().data_ptr() for tensor in made}) == 3
