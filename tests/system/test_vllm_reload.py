"""A reload of vLLM's that breaks off anywhere leaves a model that the next one fills: vLLM's own reload, on a small model."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from megarl.errors import RefitError
from tests.tiers import slow

pytestmark = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")

LAYERWISE = "vllm.model_executor.model_loader.reload.layerwise"
# what a reload calls for each layer, in the order of its first calls
STEPS = (
    "get_layer_params_buffers",
    "restore_layer_on_meta",
    "initialize_online_processing",
    "make_online_process_loader",
    "get_numel_loaded",
    "materialize_layer",
    "_layerwise_process",
    "_copy_and_restore_kernel_tensors",
    "_place_kernel_tensors",
)


class Model(nn.Module):
    """A tied head, a bias, a buffer of a layer, and a module that has only modules."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.block = nn.Sequential(nn.Linear(4, 5), nn.LayerNorm(5), nn.Linear(5, 4, bias=False))
        self.block[1].register_buffer("scale", torch.ones(3), persistent=False)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embedding.weight

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        from vllm.model_executor.model_loader.weight_utils import default_weight_loader

        found = dict(self.named_parameters())
        loaded = set()
        for name, weight in weights:
            parameter = found[name]
            getattr(parameter, "weight_loader", default_weight_loader)(parameter, weight)
            loaded.add(name)
        return loaded


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Any:
    from vllm.model_executor.model_loader.reload import record_metadata_for_reloading

    from megarl.models.generation.vllm.weight_engines import _Reloading

    class Engine(_Reloading):
        """Weights are there without a transfer."""

        def init_transfer_engine(self, init_info: Any) -> None: ...

        def receive_weights(self, update_info: Any) -> None:
            self.load(self.coming)

        def parse_update_info(self, update_info: dict[str, Any]) -> Any:
            return None

        def version(self) -> int | None:
            return 1

        def shutdown(self) -> None: ...

    made: Any = Engine.__new__(Engine)
    made.model = Model()
    record_metadata_for_reloading(made.model)
    made.model_config = SimpleNamespace(dtype=torch.float32)
    made.device = torch.device("cpu")
    # there is none; vLLM's platform of a CPU does the same
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: None)
    return made


def refit(engine: Any, seed: int) -> dict[str, torch.Tensor]:
    """A whole one; the weights that were sent."""
    generator = torch.Generator().manual_seed(seed)
    sent = {name: torch.randn(parameter.shape, generator=generator) for name, parameter in Model().named_parameters()}
    engine.coming = list(sent.items())
    engine.start_weight_update()
    engine.update_weights({})
    engine.finish_weight_update()
    return sent


def places(model: nn.Module) -> dict[str, int]:
    return {name: tensor.data_ptr() for name, tensor in [*model.named_parameters(), *model.named_buffers()]}


class Breaking:
    """Fails at its call number ``at``, before or after what it stands for."""

    def __init__(self, action: Callable[..., Any], at: int, *, after: bool) -> None:
        self.__name__ = action.__name__
        self._action, self._left, self._after = action, at, after
        self.failed = False

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        self._left -= 1
        fails = self._left == 0
        if fails and not self._after:
            self.failed = True
            raise MemoryError("no more")
        result = self._action(*arguments, **options)
        if fails:
            self.failed = True
            raise MemoryError("no more")
        return result


@slow
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("step", STEPS)
def test_the_next_reload_fills_a_model_in_which_one_broke_off(engine: Any, monkeypatch: pytest.MonkeyPatch, step: str, after: bool) -> None:
    import importlib

    layerwise = importlib.import_module(LAYERWISE)
    right = getattr(layerwise, step)
    refit(engine, 0)
    before = places(engine.model)
    for at in range(1, 100):
        broken = Breaking(right, at, after=after)
        monkeypatch.setattr(layerwise, step, broken)
        with contextlib.suppress(MemoryError, RefitError):
            refit(engine, at)
        monkeypatch.setattr(layerwise, step, right)
        if not broken.failed:
            break
        sent = refit(engine, 1000 + at)
        # in the same memory, which a CUDA graph reads
        assert places(engine.model) == before, (step, at)
        assert all(torch.equal(parameter, sent[name]) for name, parameter in engine.model.named_parameters()), (step, at)
        assert engine.model.head.weight is engine.model.embedding.weight and torch.equal(engine.model.block[1].scale, torch.ones(3))
    assert 1 < at < 99
