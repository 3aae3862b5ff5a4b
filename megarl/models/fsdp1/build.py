"""Gives a model built on the meta device its weights, one module at a time, and keeps track of where its
parameters are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from converters.checkpoint.source import HuggingFaceSource
from megarl.models.huggingface.loading import check_fits


@dataclass(frozen=True, slots=True)
class Held:
    """The module and name that a parameter has in the model, which sharding does not change.

    Attributes:
        names: its names in the model; two for a tied output layer.
        places: the modules that have it under these names, each with the attribute there.
        shape: its whole shape.
    """

    names: tuple[str, ...]
    places: tuple[tuple[nn.Module, str], ...]
    shape: torch.Size

    @property
    def module(self) -> nn.Module:
        """The first module that has it."""
        return self.places[0][0]

    def get(self) -> nn.Parameter:
        """Return what stands there now: the whole parameter, or this rank's part of it."""
        module, attribute = self.places[0]
        return getattr(module, attribute)

    def put(self, parameter: nn.Parameter) -> None:
        """Let it be ``parameter`` from now on, wherever it is used."""
        for module, attribute in self.places:
            setattr(module, attribute, parameter)


def held_by(model: nn.Module) -> dict[str, Held]:
    """Every parameter once, by its first name: a tied output layer goes by the embedding's."""
    # By identity of the parameter: tied ones have several names and are stepped once.
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)

    def place(name: str) -> tuple[nn.Module, str]:
        owner, _, attribute = name.rpartition(".")
        return model.get_submodule(owner), attribute

    return {
        all_[0]: Held(tuple(all_), tuple(place(name) for name in all_), parameter.shape)
        for parameter, all_ in names.items()
    }


def named(held: Mapping[str, Held]) -> Iterator[tuple[str, nn.Parameter]]:
    """Parameters by name, as they stand in the model now."""
    return ((name, place.get()) for name, place in held.items())


class Filler:
    """Gives the parameters of one module at a time their memory and their values. Tied parameters
    stay one parameter.

    Args:
        model: built on the meta device, its buffers real.
        source: Hugging Face weights.
        device: where the parameters go.
        dtype: that they are kept in.

    Raises:
        ModelError: the checkpoint does not hold exactly this model.
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
        """Fill the parameters that ``module`` itself has and that have no memory yet."""
        for parameter in list(module.parameters(recurse=False)):
            if parameter.is_meta:
                name = self._names[parameter]
                values = self._source.read(name).to(self._device, self.dtype)
                self.held[name].put(nn.Parameter(values, requires_grad=parameter.requires_grad))
