"""The interface that every backend implements for the engine. Everything that the backends share is in the
engine; a backend supplies only what really differs."""

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
WriteModelFiles = Callable[[Path, torch.dtype], None]
"""Writes config, tokenizer and so on, for weights of a dtype, into a directory."""


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """The outcome of an optimizer step.

    Attributes:
        grad_norm: L2 norm of the whole model's gradient before clipping.
        stepped: False when no step was taken, because gradients overflowed (float16 loss scaling) or were not
            accepted.
        overflowed: the loss scale of float16 was too large and has been lowered.
        metrics: further metrics of the global batch, equal on all ranks.
    """

    grad_norm: float
    stepped: bool
    overflowed: bool = False
    metrics: Mapping[str, float] = field(default_factory=dict)


class Backend(Protocol):
    """A model sharded over the workers, with its optimizer. Every method is collective unless its docstring
    calls it local.

    Gradient convention: ``forward_backward`` leaves the plain sum, over micro-batches and data-parallel
    ranks, of the gradients of the losses that the head returned. All context-parallel ranks compute the same
    loss; each of them adds what its own tokens contribute.

    Attributes:
        hf_config: the model's config.
        groups: process groups of this worker.
        vocabulary: this rank's columns of the output layer.
        shapes: the model's requirements on micro-batches.
        replicas_in_step: group of the data-parallel replicas whose passes share collectives, so that all of
            them need the same number of micro-batches; None if each replica may run by itself.
        untouched: weights and files of the model's directory that training leaves unchanged and that an
            export contains again.
    """

    hf_config: Any
    untouched: Untouched
    groups: ParallelGroups
    vocabulary: VocabularyShard
    shapes: Shapes

    @property
    def replicas_in_step(self) -> dist.ProcessGroup | None:
        """Group of the replicas that need the same number of micro-batches; see the class."""

    def forward_backward(
        self, inputs: Sequence[ModelInput], head: Head, *, backward: bool
    ) -> list[HeadOutput]:
        """Run the head on every micro-batch, after ``zero_grad`` with ``backward`` and after
        ``sync_parameters`` without it. Return its results on the last pipeline stage, and an empty list on
        the other stages."""

    def set_training(self, training: bool) -> None:
        """Switch the model to training or evaluation mode. Local."""

    def is_training(self) -> bool:
        """Return the mode that ``set_training`` chose last. Local."""

    def zero_grad(self) -> None:
        """Clear all gradients, once the last step is finished."""

    def apply_gradients(self, accepts: Callable[[float], bool]) -> StepOutcome:
        """Clip the gradients and take an optimizer step, of which the part in host memory may go on until
        ``sync_parameters``, ``zero_grad`` or a move of the parameters. Nothing changes if ``accepts``, a
        collective called with the gradient's norm, returns False."""

    def lr_step(self) -> None:
        """Advance the learning-rate and weight-decay schedule by one ``train()`` call. Local."""

    def schedule_values(self) -> dict[str, float]:
        """Return ``lr`` and ``wd`` of the next optimizer step. Local."""

    def parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield this rank's shards under the backend's own names, and the other tensors that a checkpoint
        holds and that get no gradient. Local."""

    def trainable(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the part of ``parameters`` that gradients, their norm, the optimizer and its checkpoint
        cover: only the adapters, if there are any. Local."""

    def without_adapters(self) -> contextlib.AbstractContextManager[None] | None:
        """Return a context in which the model computes with its base weights alone, which nothing changes;
        None for a model without adapters. Local."""

    def sync_parameters(self) -> None:
        """Finish the last step and all pending gathers of updated parameters, so that parameters may be read
        or written."""

    def parameters_changed(self) -> None:
        """Update all further copies of the parameters (a tied output layer, the optimizer's own) after the
        parameters were written from outside."""

    def export_hf(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield Hugging Face names and full tensors, in the same order on all ranks. Adapters are merged into
        their base weights, one bucket at a time."""

    def export_stage(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the part of ``export_hf`` that this pipeline stage holds, in the same order. From the second
        export on, only the ranks of the stage take part."""

    def export_adapters(self) -> tuple[dict[str, Any], Iterator[tuple[str, torch.Tensor]]] | None:
        """Return PEFT's config of the adapters, and an iterator over their PEFT names and full factors, in
        the same order on all ranks; None for a model without adapters."""

    def agree_on_slices(self, wanted: Sequence[Slices], beside: int) -> Mapping[str, Slice]:
        """Choose the weights that ``export_slices`` gives as slices, because no rank needs another rank's
        shard for them.

        Args:
            wanted: the slices that each rank of an engine reads.
            beside: the engine's rank that reads this rank's weights; -1 for none.

        Returns:
            The slices that are read from this rank, with the same names on all ranks; empty if the backend
            gathers all weights.
        """

    def export_slices(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield names and tensors as ``export_hf`` does, but with slices of the weights that were agreed
        on."""

    @property
    def gathered_bytes(self) -> int:
        """Maximum bytes that an export holds in addition to the model, unless a single parameter takes more;
        0 if there is no bound."""

    def names_by_stage(self) -> Sequence[Sequence[str]]:
        """Return the names that ``export_stage`` yields on each pipeline stage, which the first export makes
        known without another one; empty if there is one stage. Local."""

    def move(self, part: Part, place: Place) -> None:
        """Move parameters, gradients or optimizer state between the device and host memory; do nothing on a
        CPU. Local, but a move of parameters finishes the last step first."""

    def save(self, weights: Path, optimizer: Path | None, write_model_files: WriteModelFiles) -> None:
        """Write the weights into one directory, and optimizer state, schedule and random-number states into
        another. ``write_model_files`` writes the files of the model next to weights that are read by
        them."""

    def require_loadable(self, weights: Path, optimizer: Path | None) -> None:
        """Raise, before a load has changed anything, if the directories do not hold a checkpoint of this
        kind. Local.

        Raises:
            CheckpointError: there is no checkpoint, or the optimizer's state has another format.
            StateError: ``optimizer`` is given, and this backend has no optimizer.
        """

    def load(self, weights: Path, optimizer: Path | None) -> None:
        """Load what ``save`` wrote, from any parallel layout. Collective; after an error some of the weights
        may already be the checkpoint's."""


def log_changed_rate(steps: int, before: float, now: float) -> None:
    """Log on the first rank that a resumed run's learning rate differs from its checkpoint's."""
    if before != now and dist.get_rank() == 0:
        logger.warning(
            "learning rate after step %d: %g, by the changed schedule; the checkpoint has %g",
            steps,
            now,
            before,
        )


def require_optimizer(optimizer: Optimizer | None) -> Optimizer:
    """Return ``optimizer``, whose state is about to be saved or loaded.

    Raises:
        StateError: the backend was built without an optimizer.
    """
    if optimizer is None:
        raise StateError(
            "optimizer_path was given, but this worker was built with init_optimizer=False; build it with "
            "an optimizer"
        )
    return optimizer
