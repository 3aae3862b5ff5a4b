"""The interface that every backend implements for the training engine. It contains only what differs between
backends."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar

import torch
import torch.distributed as dist

from converters.untouched import Untouched
from megarl.errors import StateError
from megarl.models.engine.groups import ParallelGroups
from megarl.models.engine.heads import Head, HeadOutput
from megarl.models.engine.logprobs import VocabularyShard
from megarl.models.engine.microbatches import Shapes
from megarl.models.engine.model_input import ModelInput
from megarl.weight_sync.plan import WeightIterator
from megarl.weight_sync.slices import Slice, Slices

if TYPE_CHECKING:
    from megarl.models.engine.adapters import AdapterExport

logger = logging.getLogger(__name__)

Optimizer = TypeVar("Optimizer")
Part = Literal["parameters", "gradients", "optimizer"]
Place = Literal["device", "host"]
WriteModelFiles = Callable[[Path, torch.dtype], None]
"""Function of a directory and a dtype. Writes the files that belong to weights of that dtype: config,
tokenizer and so on."""


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """The outcome of an optimizer step.

    Attributes:
        grad_norm: L2 norm of the whole model's gradient before clipping.
        stepped: False if the step was skipped, because gradients overflowed (float16 loss scaling) or
            ``accepts`` rejected their norm.
        overflowed: the float16 loss scale was too large and has been lowered.
        metrics: further metrics of the global batch, equal on all ranks.
    """

    grad_norm: float
    stepped: bool
    overflowed: bool = False
    metrics: Mapping[str, float] = field(default_factory=dict)


class Backend(Protocol):
    """A sharded model with its optimizer. Every method is collective unless its docstring says "Local".

    Gradient convention: ``forward_backward`` accumulates the plain sum of the gradients of all losses that
    the head returns, over micro-batches and data-parallel ranks; nothing is averaged. All context-parallel
    ranks compute the same loss, and each contributes the gradient of its own tokens.

    Attributes:
        hf_config: the model's Hugging Face config.
        groups: process groups of this worker.
        vocabulary: the part of the vocabulary whose logits this rank computes.
        shapes: the model's requirements on the shapes of micro-batches.
        replicas_in_step: group of the data-parallel replicas whose forward passes share collectives, so that
            all need the same number of micro-batches; None if replicas are independent.
        untouched: weights and files of the model's directory that training does not change; an export copies
            them.
    """

    hf_config: Any
    untouched: Untouched
    groups: ParallelGroups
    vocabulary: VocabularyShard
    shapes: Shapes

    @property
    def replicas_in_step(self) -> dist.ProcessGroup | None:
        """Group of the data-parallel replicas that must run the same number of micro-batches; see the
        class."""

    def forward_backward(
        self, inputs: Sequence[ModelInput], head: Head, *, backward: bool
    ) -> list[HeadOutput]:
        """Run the model and the head on every micro-batch.

        Call ``zero_grad`` before it with ``backward=True``, and ``sync_parameters`` with ``backward=False``.
        Returns the head's results on the last pipeline stage, and an empty list on the other stages.
        """

    def set_training(self, training: bool) -> None:
        """Switch the model to training or evaluation mode. Local."""

    def is_training(self) -> bool:
        """Return the mode that was set last with ``set_training``. Local."""

    def zero_grad(self) -> None:
        """Clear all gradients. Waits until the last optimizer step is finished."""

    def apply_gradients(self, accepts: Callable[[float], bool]) -> StepOutcome:
        """Clip the gradients and take an optimizer step.

        The part of the step that runs in host memory may continue after the return, until
        ``sync_parameters``, ``zero_grad`` or a move of the parameters waits for it.

        Args:
            accepts: called with the gradient norm; collective. If it returns False, nothing is changed.
        """

    def lr_step(self) -> None:
        """Advance the learning-rate and weight-decay schedule by one ``train()`` call. Local."""

    def schedule_values(self) -> dict[str, float]:
        """Return ``lr`` and ``wd`` (learning rate and weight decay) of the next optimizer step. Local."""

    def parameters(self) -> WeightIterator:
        """Yield this rank's parameter shards under the backend's own names, and the tensors without gradient
        that a checkpoint also contains. Local."""

    def trainable(self) -> WeightIterator:
        """Yield the subset of ``parameters`` that is trained: only the adapters if there are any. Gradient
        norm and optimizer state cover exactly these. Local."""

    def without_adapters(self) -> contextlib.AbstractContextManager[None] | None:
        """Return a context in which the model computes with its base weights alone; None for a model without
        adapters. Local."""

    def sync_parameters(self) -> None:
        """Finish the last optimizer step and all pending all-gathers of updated parameters. Call this before
        reading or writing parameters."""

    def parameters_changed(self) -> None:
        """Update all other copies of the parameters (a tied output layer, the optimizer's master copy). Call
        this after writing to the parameters directly."""

    def export_hf(self) -> WeightIterator:
        """Yield Hugging Face names and full tensors, in the same order on all ranks. Adapters are merged into
        their base weights, one bucket at a time."""

    def export_stage(self) -> WeightIterator:
        """Yield the weights of ``export_hf`` that this pipeline stage owns, in the same order. From the
        second export on, only the ranks of the stage take part."""

    def export_adapters(self) -> AdapterExport | None:
        """Return PEFT's config of the adapters and an iterator over (PEFT name, full factor), in the same
        order on all ranks. None for a model without adapters."""

    def agree_on_slices(self, wanted: Sequence[Slices], beside: int) -> Mapping[str, Slice]:
        """Choose the weights that ``export_slices`` yields as slices: those for which no rank needs another
        rank's shard.

        Args:
            wanted: for each rank of an engine, the slices that it reads.
            beside: the engine rank that reads from this rank; -1 if none does.

        Returns:
            The slice of each chosen weight that is read from this rank; the names are equal on all ranks.
            Empty if the backend gathers all weights.
        """

    def export_slices(self) -> WeightIterator:
        """Yield names and tensors like ``export_hf``, but yield slices of the weights chosen by
        ``agree_on_slices``."""

    @property
    def gathered_bytes(self) -> int:
        """Maximum bytes that an export allocates in addition to the model, unless a single parameter is
        larger; 0 if there is no limit."""

    def names_by_stage(self) -> Sequence[Sequence[str]]:
        """Return the names that ``export_stage`` yields on each pipeline stage; empty if there is one stage.
        The first export makes them known. Local."""

    def move(self, part: Part, place: Place) -> None:
        """Move parameters, gradients or optimizer state between device and host memory. No-op on a CPU.
        Local, except that moving parameters first finishes the last optimizer step."""

    def save(self, weights: Path, optimizer: Path | None, write_model_files: WriteModelFiles) -> None:
        """Write the weights into one directory; write optimizer state, schedule and random-generator states
        into the other. ``write_model_files`` is called if the weights are in a format that needs the model's
        files next to it."""

    def require_loadable(self, weights: Path, optimizer: Path | None) -> None:
        """Check that the directories contain a checkpoint of this backend, before ``load`` changes anything.
        Local.

        Raises:
            CheckpointError: there is no checkpoint, or the optimizer state has another format.
            StateError: ``optimizer`` is given, but this backend has no optimizer.
        """

    def load(self, weights: Path, optimizer: Path | None) -> None:
        """Load a checkpoint of ``save``, written with any parallel layout. After an error, some weights may
        already be those of the checkpoint."""


def log_changed_rate(steps: int, before: float, now: float) -> None:
    """Warn on the first rank if a resumed run's learning rate differs from the checkpoint's."""
    if before != now and dist.get_rank() == 0:
        logger.warning(
            "learning rate after step %d: %g, by the changed schedule; the checkpoint has %g",
            steps,
            now,
            before,
        )


def require_optimizer(optimizer: Optimizer | None) -> Optimizer:
    """Return ``optimizer``, whose state is to be saved or loaded.

    Raises:
        StateError: the backend was built without an optimizer.
    """
    if optimizer is None:
        raise StateError(
            "optimizer_path was given, but this worker was built with init_optimizer=False; build it with "
            "an optimizer"
        )
    return optimizer
