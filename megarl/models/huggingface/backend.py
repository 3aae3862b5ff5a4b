"""Base class of the torch backends: the engine's ``Backend`` protocol except sharding, gathering and export
of parameters."""

from __future__ import annotations

import contextlib
import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from converters.checkpoint.source import HuggingFaceSource
from converters.families.hf_config import read_hf_config
from converters.untouched import Untouched
from megarl.checkpoint.adapter_base import BaseModel, refuse_adapters
from megarl.checkpoint.staging import StagingBuffers
from megarl.config.backend import scores
from megarl.config.generation import GenerationConfig
from megarl.config.nested import at
from megarl.config.policy import PolicyConfig
from megarl.distributed.batched_data_dict import BatchedDataDict
from megarl.distributed.device import DeviceRuntime
from megarl.models.engine.backend import Part, Place, StepOutcome, WriteModelFiles, require_optimizer
from megarl.models.engine.groups import ParallelGroups, share_random_state
from megarl.models.engine.logprobs import VocabularyShard
from megarl.models.engine.low_precision_adam import SUM
from megarl.models.engine.microbatches import Shapes
from megarl.models.engine.offload_state import HostCopies
from megarl.models.engine.precision import dtype_of
from megarl.models.engine.scoring import scoring_config, scoring_source
from megarl.models.huggingface import checkpoint
from megarl.models.huggingface.generation import generate
from megarl.models.huggingface.mover import move_optimizer
from megarl.models.huggingface.optimizer import (
    LossScale,
    build_optimizer,
    build_scheduler,
    clip,
    global_norm,
    local_gradients,
    resume_schedule,
    saved_schedule,
    schedule_values,
)
from megarl.weight_sync.plan import WeightIterator
from megarl.weight_sync.slices import Slice, Slices

if TYPE_CHECKING:
    from megarl.models.engine.adapters import AdapterConfig, AdapterExport

# Checkpoint keys of the loss scale, stored in the first parameter group.
SCALE_KEYS = ("loss_scale", "loss_scale_clean_steps")


class ParameterStore(Protocol):
    """The sharded parameters of a model, for checkpoints. Every method except ``move`` is collective."""

    def move(self, place: Place) -> None:
        """Move parameters and buffers to the device or to host memory."""

    def state(self) -> dict[str, torch.Tensor]:
        """Return the weights for a checkpoint. After loading into them, pass them to ``load_state``."""

    def load_state(self, state: dict[str, torch.Tensor]) -> None:
        """Copy a loaded ``state`` into the parameters."""

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> checkpoint.OptimizerState:
        """Return the optimizer state for a checkpoint, by parameter name."""

    def load_optimizer_state(
        self, optimizer: torch.optim.Optimizer, loaded: checkpoint.OptimizerState
    ) -> None:
        """Load the result of ``optimizer_state``."""


class HuggingFaceBackend(ABC):
    """One worker's shard of a transformers model, with its optimizer and schedule.

    Stored parameters, gradients and optimizer state are float32, unless ``policy.optimizer`` sets another
    dtype for parameters or state. The model computes in ``policy.precision``.

    Args:
        policy: the validated policy configuration.
        source: Hugging Face weights to start from.
        runtime: device of this process; torch.distributed must be initialised on its backend.
        seed: seed of a new score layer, of adapters and of stochastic rounding.
        with_optimizer: False for a model that is not trained.

    Raises:
        ConfigError: the layout, plan, precision, optimizer or schedule is not supported.
        ModelError: the model's config and weights do not match, or transformers has no
            sequence-classification form of it.
    """

    groups: ParallelGroups
    vocabulary: VocabularyShard
    shapes: Shapes
    # The module that runs the passes.
    module: nn.Module
    # True if parameters, gradients and optimizer state stay in host memory between uses.
    offloads: bool
    # The parameters that the optimizer updates, without duplicates.
    _parameters: dict[str, nn.Parameter]
    # Number of dimensions of each full parameter, by name; None if the shards have the same number.
    _dimensions: Mapping[str, int] | None = None
    # True if activations between sharded layers are split over the sequence.
    _sequence_parallel: bool = False
    _store: ParameterStore

    def __init__(
        self,
        policy: PolicyConfig,
        source: HuggingFaceSource,
        runtime: DeviceRuntime,
        *,
        seed: int = 0,
        with_optimizer: bool = True,
    ) -> None:
        self.policy = policy
        self.runtime = runtime
        self._dtype = self._dtype_of(policy["precision"])
        kept = at(policy, "optimizer.master_dtype") or "float32"
        self._kept_dtype = dtype_of(kept, "policy.optimizer.master_dtype")
        self._trusts = policy["trust_remote_code"]
        self.hf_config = read_hf_config(source.directory, trust_remote_code=self._trusts)
        if scores(policy):
            self.hf_config = scoring_config(self.hf_config)
            source = scoring_source(source, self.hf_config, seed)
        self.untouched = Untouched(source)
        self.loss_scale = LossScale()
        self._optimizer_copies = HostCopies(runtime)
        self._staging = StagingBuffers()
        self._seed = seed
        self._base = BaseModel(source)
        self.optimizer: torch.optim.Optimizer | None = None
        self.scheduler: LRScheduler | None = None
        self._build(source)
        if with_optimizer:
            # Check here, instead of failing in the first step after minutes of sampling.
            self._refuse_optimizer()
            self.optimizer = build_optimizer(policy, self._parameters.items(), self._dimensions, seed)
            self.scheduler = build_scheduler(policy, self.optimizer)
        self.set_training(True)

    def _dtype_of(self, precision: str) -> torch.dtype:
        return dtype_of(precision, "policy.precision")

    @abstractmethod
    def _build(self, source: HuggingFaceSource) -> None:
        """Build the model with this rank's shards of the weights, and set the attributes declared above."""

    @abstractmethod
    def _refuse_optimizer(self) -> None:
        """Check that the configured optimizer can update parameters as this backend shards them.

        Raises:
            ConfigError: it cannot.
        """

    def _counted(self) -> Iterable[nn.Parameter]:
        """Return the parameters that this rank contributes to the gradient norm."""
        return self._parameters.values()

    @abstractmethod
    def _generating_model(self) -> contextlib.AbstractContextManager[nn.Module]:
        """Yield a model with the current weights that data-parallel ranks can run independently, with
        different numbers and lengths of rows."""

    @abstractmethod
    def export_hf(self) -> WeightIterator:
        """Yield Hugging Face names and full tensors in ``policy.precision``."""

    @property
    def replicas_in_step(self) -> dist.ProcessGroup | None:
        """The data-parallel group, because every pass gathers parameters over it; None if it has one rank."""
        return self.groups.data if self.groups.data_size > 1 else None

    def set_training(self, training: bool) -> None:
        self.module.train(training)

    def is_training(self) -> bool:
        return bool(self.module.training)

    def parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        return iter(self._parameters.items())

    def trainable(self) -> WeightIterator:
        for name, parameter in self.parameters():
            if parameter.requires_grad:
                yield name, parameter

    def without_adapters(self) -> contextlib.AbstractContextManager[None] | None:
        return None

    def export_adapters(self) -> AdapterExport | None:
        return None

    def zero_grad(self) -> None:
        for parameter in self._parameters.values():
            parameter.grad = None
            # Clear the float32 gradient sum of a 16-bit parameter too, which torch's zero_grad does not know.
            setattr(parameter, SUM, None)

    def apply_gradients(self, accepts: Callable[[float], bool]) -> StepOutcome:
        assert self.optimizer is not None, "built without an optimizer"
        factor = self.loss_scale.factor
        # Divide the norm by the loss scale. The gradients are divided later, and only if they are used.
        norm = global_norm(self._counted(), self.runtime.device) / factor
        # Ask the loss scaler before the caller: an overflow means that the scale was too large, and the
        # scaler lowers it.
        if not self.loss_scale.accepts(norm):
            return StepOutcome(norm, False, overflowed=factor > 1.0)
        if not accepts(norm):
            return StepOutcome(norm, False)
        # Use local shards, because DTensor dispatches every operation for each parameter.
        gradients = local_gradients(self._parameters.values())
        if factor != 1.0:
            for gradient in gradients:
                gradient.mul_(1.0 / factor)
        clip(gradients, norm, self.policy["max_grad_norm"])
        self.optimizer.step()
        return StepOutcome(norm, True)

    def lr_step(self) -> None:
        if self.scheduler is not None:
            self.scheduler.step()

    def schedule_values(self) -> dict[str, float]:
        return schedule_values(self.optimizer) if self.optimizer is not None else {}

    def sync_parameters(self) -> None:  # noqa: B027 - there is nothing to do
        """Do nothing: every pass gathers the parameters and frees them, so no gather is ever pending."""

    def parameters_changed(self) -> None:  # noqa: B027 - there is nothing to do
        """Do nothing: there are no copies, and the next pass reads the parameters again."""

    def export_stage(self) -> WeightIterator:
        """Export all weights, because there is only one stage."""
        return self.export_hf()

    def agree_on_slices(self, wanted: Sequence[Slices], beside: int) -> Mapping[str, Slice]:
        """Return an empty mapping, because all weights are gathered."""
        return {}

    def export_slices(self) -> WeightIterator:
        """Export all weights in full."""
        return self.export_hf()

    def names_by_stage(self) -> Sequence[Sequence[str]]:
        """Return an empty sequence, because there is only one stage."""
        return ()

    @torch.no_grad()
    def generate(
        self, data: BatchedDataDict[Any], config: GenerationConfig, tokenizer: Any, *, greedy: bool
    ) -> BatchedDataDict[Any]:
        """Continue prompts; see ``decode``.

        The weights are gathered once, into a separate model, so that ranks need not wait for others with more
        or longer rows. If there is nothing to gather, the model itself generates.
        """
        with self._generating_model() as model:
            return generate(model, self, data, config, tokenizer, greedy=greedy)

    def move(self, part: Part, place: Place) -> None:
        """Move a part of the model to the device or to host memory. Gradients are freed instead of moved."""
        if not self.runtime.is_cuda:
            return
        if part == "gradients":
            self.zero_grad()
        # FSDP keeps these in host memory and moves them itself.
        elif self.offloads:
            return
        elif part == "parameters":
            self._store.move(place)
        elif self.optimizer is not None:
            if place == "host":
                self._optimizer_copies.take(functools.partial(move_optimizer, self.optimizer))
            else:
                move_optimizer(
                    self.optimizer, lambda tensor: tensor.to(self.runtime.device, non_blocking=True)
                )
        self.runtime.synchronize()

    def save(self, weights: Path, optimizer: Path | None, write_model_files: WriteModelFiles) -> None:
        trained = require_optimizer(self.optimizer) if optimizer is not None else None
        peft = self._as_peft()
        add = None if peft is None else functools.partial(self._base.write, peft=peft)
        checkpoint.save_weights(self._store.state(), weights, self._staging.of(weights), add)
        if optimizer is not None and trained is not None:
            assert self.scheduler is not None, "built with the optimizer"
            state, schedule = (
                self._store.optimizer_state(trained),
                saved_schedule(self.policy, self.scheduler),
            )
            if self.loss_scale.dynamic:
                # torch's format of optimizer state has no field for the loss scale, so store it in the first
                # parameter group.
                state["param_groups"][0].update(
                    zip(SCALE_KEYS, (self.loss_scale.factor, self.loss_scale.clean_steps), strict=True)
                )
            checkpoint.save_optimizer(state, schedule, self.runtime, optimizer, self._staging.of(optimizer))

    def require_loadable(self, weights: Path, optimizer: Path | None) -> None:
        checkpoint.require(weights)
        peft = self._as_peft()
        if peft is None:
            refuse_adapters(weights)
        else:
            self._base.require_same(weights, peft)
        if optimizer is not None:
            require_optimizer(self.optimizer)
            checkpoint.require(optimizer)

    def _as_peft(self) -> AdapterConfig | None:
        """Return PEFT's config of the adapters; None if there are none."""
        return None

    def load(self, weights: Path, optimizer: Path | None) -> None:
        trained = require_optimizer(self.optimizer) if optimizer is not None else None
        state = self._store.state()
        checkpoint.load_weights(state, weights)
        self._store.load_state(state)
        if optimizer is not None and trained is not None:
            loaded, schedule = checkpoint.load_optimizer(state, self.runtime, optimizer)
            if not self._sequence_parallel:
                # Random-number states are saved per rank. In the saved layout these tensor-parallel ranks may
                # have been replicas with different states; they need the same one.
                share_random_state(self.runtime, self.groups.tensor)
            # The optimizer would keep these keys among its hyperparameters.
            factor, clean_steps = (loaded["param_groups"][0].pop(key, None) for key in SCALE_KEYS)
            if self.loss_scale.dynamic and factor is not None:
                self.loss_scale.factor, self.loss_scale.clean_steps = factor, clean_steps
            self._store.load_optimizer_state(trained, loaded)
            assert self.scheduler is not None, "built with the optimizer"
            self.scheduler = resume_schedule(self.policy, self.scheduler, schedule)

    def close(self) -> None:
        """Free the memory of staged checkpoints. Process groups end with torch's default group."""
        self._staging.close()
