"""Loads weights into a model on the meta device, one module at a time, and tracks which modules hold each
parameter."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from converters.checkpoint.source import HuggingFaceSource
from megarl.models.huggingface.loading import check_fits


@dataclass(frozen=True, slots=True)
class Held:
    """The modules that hold a parameter, and its names; sharding changes neither.

    Attributes:
        names: names of the parameter in the model; two for a tied output layer.
        places: for each name, the module that holds the parameter, and the attribute.
        shape: full shape of the parameter.
    """

    names: tuple[str, ...]
    places: tuple[tuple[nn.Module, str], ...]
    shape: torch.Size

    @property
    def module(self) -> nn.Module:
        """The first module that holds the parameter."""
        return self.places[0][0]

    def get(self) -> nn.Parameter:
        """Return the current parameter: the full one, or this rank's shard of it."""
        module, attribute = self.places[0]
        return getattr(module, attribute)

    def put(self, parameter: nn.Parameter) -> None:
        """Replace the parameter in all modules that hold it."""
        for module, attribute in self.places:
            setattr(module, attribute, parameter)


def held_by(model: nn.Module) -> dict[str, Held]:
    """Return every parameter once, by its first name: a tied output layer is listed under the embedding's
    name."""
    # Key by parameter: a tied parameter has several names but must be updated once.
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)

    def place(name: str) -> tuple[nn.Module, str]:
        owner, _, attribute = name.rpartition(".")
        return model.get_submodule(owner), attribute

    return {
        all_[0]: Held(tuple(all_), tuple(map(place, all_)), parameter.shape)
        for parameter, all_ in names.items()
    }


def named(held: Mapping[str, Held]) -> Iterator[tuple[str, nn.Parameter]]:
    """Return an iterator over names and current parameters."""
    for name, place in held.items():
        yield name, place.get()


class Filler:
    """Callable that allocates and loads the parameters of one module at a time. Tied parameters stay tied.

    Args:
        model: model on the meta device, with real buffers.
        source: Hugging Face weights.
        device: device of the parameters.
        dtype: dtype in which parameters are stored.

    Raises:
        ModelError: names or shapes in the checkpoint differ from the model's.
    """

    def __init__(
        self, model: nn.Module, source: HuggingFaceSource, device: torch.device, dtype: torch.dtype
    ) -> None:
        self._source = source
        self._device = device
        self.dtype = dtype
        self.held = held_by(model)
        self._names = {place.get(): name for name, place in self.held.items()}
        check_fits(model, source, {name: tuple(place.shape) for name, place in self.held.items()})

    def __call__(self, module: nn.Module) -> None:
        """Load the parameters that belong directly to ``module`` and have no memory yet."""
        for parameter in list(module.parameters(recurse=False)):
            if parameter.is_meta:
                name = self._names[parameter]
                values = self._source.read(name).to(self._device, self.dtype)
                self.held[name].put(nn.Parameter(values, requires_grad=parameter.requires_grad))
