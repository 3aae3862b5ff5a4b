"""A reload of vLLM's that breaks off anywhere leaves a model that the next one fills: vLLM's own reload, on a
small model."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

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

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
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


def refit(engine: Any, seed: int) -> dict[str, Tensor]:
    """A whole one; the weights that were sent."""
    generator = torch.Generator().manual_seed(seed)
    sent = {
        name: torch.randn(parameter.shape, generator=generator)
        for name, parameter in Model().named_parameters()
    }
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
def test_the_next_reload_fills_a_model_in_which_one_broke_off(
    engine: Any, monkeypatch: pytest.MonkeyPatch, step: str, after: bool
) -> None:
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
        assert all(
            torch.equal(parameter, sent[name]) for name, parameter in engine.model.named_parameters()
        ), (step, at)
        assert engine.model.head.weight is engine.model.embedding.weight and torch.equal(
            engine.model.block[1].scale, torch.ones(3)
        )
    assert 1 < at < 99


def half(dim: int) -> Callable[[Tensor, Tensor], None]:
    """The loader of the second of two ranks; its first argument is called as vLLM's reload calls it."""

    def load(param: Tensor, weight: Tensor) -> None:
        size = param.shape[dim]
        param.data.copy_(weight.narrow(dim, size, size))

    return load


# weights that a rank has half of, and the whole ones' shapes where they differ
HALVES = {"block.0.weight": 0, "block.0.bias": 0, "block.2.weight": 1, "embedding.weight": 0}
WHOLE = {
    "block.0.weight": (10, 4),
    "block.0.bias": (10,),
    "block.2.weight": (4, 10),
    "embedding.weight": (14, 4),
}


def test_looking_on_leaves_the_model_as_it_was_and_slices_fill_it_like_whole_weights(engine: Any) -> None:
    from vllm.model_executor.model_loader.reload import record_metadata_for_reloading

    from megarl.models.generation.vllm.weight_engines import Connection, SharedMemoryEngine
    from megarl.weight_sync.manifest import Manifest
    from megarl.weight_sync.session import WeightReceiver
    from megarl.weight_sync.slices import Slice

    made: Any = SharedMemoryEngine.__new__(SharedMemoryEngine)
    made.model, made.model_config, made.device = Model(), engine.model_config, engine.device
    found = dict(made.model.named_parameters())
    for name, dim in HALVES.items():
        found[name].weight_loader = half(dim)
    record_metadata_for_reloading(made.model)
    shapes = {name: WHOLE.get(name, tuple(parameter.shape)) for name, parameter in found.items()}
    manifest = Manifest.from_description({name: (shape, torch.float32) for name, shape in shapes.items()})
    made._receiver, made.parallel_config = (
        WeightReceiver(manifest, made.device),
        SimpleNamespace(world_size=2),
    )
    made.learn(manifest, Connection([]))
    before, values = (
        places(made.model),
        {name: tensor.clone() for name, tensor in made.model.state_dict().items()},
    )
    expected = {
        name: Slice(dim, WHOLE[name][dim] // 2, WHOLE[name][dim] // 2) for name, dim in HALVES.items()
    }
    for _ in range(2):
        assert made.slices_read()[1] == {name: where.plain() for name, where in expected.items()}
    assert places(made.model) == before
    assert all(torch.equal(tensor, values[name]) for name, tensor in made.model.state_dict().items())

    generator = torch.Generator().manual_seed(2)
    sent = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    loaded = []
    for names in ([], list(HALVES)):
        made.take_slices(names)
        made.start_weight_update()
        made.load(
            [(name, expected[name].of(tensor) if name in names else tensor) for name, tensor in sent.items()]
        )
        made._receiver.version = 1
        made.finish_weight_update()
        assert places(made.model) == before
        loaded.append({name: tensor.clone() for name, tensor in made.model.state_dict().items()})
        with torch.no_grad():
            for parameter in found.values():
                parameter.zero_()
    assert [name for name, tensor in loaded[1].items() if not torch.equal(tensor, loaded[0][name])] == []
    assert all(torch.equal(loaded[0][name], where.of(sent[name])) for name, where in expected.items())
