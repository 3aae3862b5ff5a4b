"""Backend: what the engine asks of a backend. Everything that the backends share lives in the engine; a
backend supplies only what really differs."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

import torch
import torch.distributed as dist

from converters.untouched import Untouched
from megarl.errors import StateError
from megarl.models.engine.groups import ParallelGroups
from megarl.models.engine.heads import Head, HeadOutput
from megarl.models.engine.logprobs import VocabularyShard
from megarl.models.engine.microbatches import Shapes
from megarl.models.engine.model_input import ModelInput
from megarl.weight_sync.slices import Slice, Slices

logger = logging.getLogger(__name__)

Optimizer = TypeVar("Optimizer")
Part = Literal["parameters", "gradients", "optimizer"]
Place = Literal["device", "host"]


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """The outcome of an optimizer step.

    Attributes:
        grad_norm: L2 norm of the whole model's gradient before clipping.
        stepped: False when no step was taken: gradients overflowed (float16 loss scaling), or were not
            accepted.
        overflowed: the loss scale of float16 was too large, and has been lowered.
        metrics: further figures of the global batch, the same on all ranks.
    """

    grad_norm: float
    stepped: bool
    overflowed: bool = False
    metrics: Mapping[str, float] = field(default_factory=dict)


class Backend(Protocol):
    """A model spread over the workers, with its optimizer. Every method is collective unless it says
    otherwise.

    Gradient convention: ``forward_backward`` leaves the plain sum over micro-batches and data-parallel ranks
    of the gradients of the losses that the head returned. Context-parallel ranks all compute the same loss;
    each of them adds what its own tokens contribute.

    Attributes:
        hf_config: the model's config.
        groups: process groups of this worker.
        vocabulary: this rank's columns of the output layer.
        shapes: what the model wants of micro-batches.
        replicas_in_step: data-parallel replicas whose passes meet in collectives, so that all need the same
            number of micro-batches; None where each may run for itself.
        untouched: what of the model's directory training leaves as it is, and an export has again.
    """

    hf_config: Any
    untouched: Untouched
    groups: ParallelGroups
    vocabulary: VocabularyShard
    shapes: Shapes

    @property
    def replicas_in_step(self) -> dist.ProcessGroup | None:
        """See the class."""

    def forward_backward(
        self, inputs: Sequence[ModelInput], head: Head, *, backward: bool
    ) -> list[HeadOutput]:
        """Run the head on every micro-batch. Results exist on the last pipeline stage, elsewhere the list is
        empty."""

    def set_training(self, training: bool) -> None:
        """Choose between training and evaluation behaviour. Local."""

    def is_training(self) -> bool:
        """Return what ``set_training`` chose last. Local."""

    def zero_grad(self) -> None:
        """Clear all gradients. Local."""

    def apply_gradients(self, accepts: Callable[[float], bool]) -> StepOutcome:
        """Clip and take an optimizer step, unless ``accepts``, a collective that is given the gradient's
        norm, refuses: then nothing changes."""

    def lr_step(self) -> None:
        """Advance the learning-rate and weight-decay schedule by one ``train()`` call. Local."""

    def schedule_values(self) -> dict[str, float]:
        """``lr`` and ``wd`` of the next optimizer step. Local."""

    def parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """This rank's shards, by the backend's own names, and what else a checkpoint has and gradients do not
        reach. Local."""

    def trainable(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Return the part of ``parameters`` that gradients, their norm, the optimizer and its checkpoint are
        about: adapters alone where there are some. Local."""

    def without_adapters(self) -> contextlib.AbstractContextManager[None] | None:
        """A context in which the model is its base, whose weights nothing changes; None for a model that has
        no adapters. Local."""

    def sync_parameters(self) -> None:
        """Finish whatever still brings updated parameters together, so that parameters may be read or
        written."""

    def parameters_changed(self) -> None:
        """Parameters were written from outside: further copies of them (a tied output layer, the optimizer's
        own) have to follow."""

    def export_hf(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Hugging Face names and full tensors, in the same order on all ranks. Of a layer with an adapter the
        sum of both, which is made a bucket at a time."""

    def export_stage(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Return the part of ``export_hf`` that this pipeline stage has, in that order. From the second
        export on collective within the stage alone."""

    def export_adapters(self) -> tuple[dict[str, Any], Iterator[tuple[str, torch.Tensor]]] | None:
        """Return PEFT's config of the adapters, and names and whole factors as PEFT has them, in the same
        order on all ranks; None for a model that has no adapters."""

    def agree_on_slices(self, wanted: Sequence[Slices], beside: int) -> Mapping[str, Slice]:
        """Choose the weights that ``export_slices`` gives as slices, because no rank needs another's shard
        for them.

        Args:
            wanted: what each rank of an engine reads.
            beside: the engine's rank that reads this one's weights; -1 for none.

        Returns:
            The slices that are read here, of the same names on all ranks; empty where a backend gathers all
            weights.
        """

    def export_slices(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Export as ``export_hf``, with slices of the weights that were agreed on."""

    @property
    def gathered_bytes(self) -> int:
        """Return the bytes that an export holds above the model at most, unless a parameter takes more; 0
        where that is not bounded."""

    def names_by_stage(self) -> Sequence[Sequence[str]]:
        """The names that ``export_stage`` gives on each pipeline stage, known after a first export without
        another; empty where there is one stage. Local."""

    def move(self, part: Part, place: Place) -> None:
        """Move parameters, gradients or optimizer state between the device and host memory (nothing to do on
        a CPU). Local."""

    def save(self, weights: Path, optimizer: Path | None) -> None:
        """Write weights, and optimizer state with schedule and random-number states, each into its own
        directory."""

    def require_loadable(self, weights: Path, optimizer: Path | None) -> None:
        """Refuse, before a load has changed anything, what is no checkpoint of this kind. Local.

        Raises:
            CheckpointError: there is none, or the optimizer's state has another form.
            StateError: ``optimizer`` is given, and this backend has none.
        """

    def load(self, weights: Path, optimizer: Path | None) -> None:
        """Read what ``save`` wrote, from any layout. Collective; after an error some of the weights may be
        the checkpoint's."""


def log_changed_rate(steps: int, before: float, now: float) -> None:
    """Say on the first rank that a resumed run has another learning rate than its checkpoint."""
    if before != now and dist.get_rank() == 0:
        logger.warning(
            "learning rate after step %d: %g, by the changed schedule; the checkpoint has %g",
            steps,
            now,
            before,
        )


def require_optimizer(optimizer: Optimizer | None) -> Optimizer:
    """``optimizer``, where its state is to be saved or loaded.

    Raises:
        StateError: the backend was built without one.
    """
    if optimizer is None:
        raise StateError(
            "optimizer_path was given, but this worker was built with init_optimizer=False; build it with "
            "an optimizer"
        )
    return optimizer
