"""The FSDP1 backend: the engine's ``Backend`` protocol on a transformers model in FullyShardedDataParallel."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from converters.checkpoint.source import HuggingFaceSource
from converters.families.hf_config import read_hf_config
from megarl.checkpoint.staging import StagingBuffers
from megarl.config.backend import scores
from megarl.distributed.batched_data_dict import BatchedDataDict
from megarl.distributed.device import DeviceRuntime
from megarl.errors import ConfigError, Violation
from megarl.models.engine.backend import Part, Place, StepOutcome, require_optimizer
from megarl.models.engine.groups import ParallelGroups
from megarl.models.engine.heads import Head, HeadOutput
from megarl.models.engine.logprobs import VocabularyShard
from megarl.models.engine.microbatches import Shapes
from megarl.models.engine.model_input import ModelInput
from megarl.models.engine.offload_state import HostCopies
from megarl.models.engine.output_layer import answer_requests
from megarl.models.engine.precision import dtype_of
from megarl.models.engine.scoring import scoring_config, scoring_source
from megarl.models.fsdp1.build import Filler, Held, held_by
from megarl.models.fsdp1.sharded import Sharded
from megarl.models.fsdp1.whole import FullModel
from megarl.models.huggingface import checkpoint
from megarl.models.huggingface.generation import generate
from megarl.models.huggingface.loading import build_on_meta, recompute_layers
from megarl.models.huggingface.optimizer import (
    build_optimizer,
    build_scheduler,
    clip,
    resume_schedule,
    saved_schedule,
    schedule_values,
    squared_norm,
)
from megarl.models.huggingface.passes import forward_backward
from megarl.models.huggingface.sending_order import in_sending_order
from megarl.weight_sync.slices import Slice, Slices

logger = logging.getLogger(__name__)
PRECISIONS = frozenset({"float32", "bfloat16"})
# their step looks at a whole matrix, of which an FSDP1 rank holds a flat piece
NOT_ELEMENTWISE = frozenset({"Adafactor", "Muon"})


class FSDP1Backend:
    """One worker's part of a transformers model, with its optimizer and schedule.

    Parameters are float32; the model computes in ``policy.precision``.

    Args:
        policy: the policy configuration, already validated.
        source: Hugging Face weights to start from.
        runtime: device of this process; torch.distributed is initialised on its backend.
        seed: of a new score layer.
        with_optimizer: False for a model that is only read.

    Raises:
        ConfigError: the precision, the optimizer or the schedule is not possible here.
        ModelError: the model's config and weights do not fit together, or transformers cannot let it score.
    """

    def __init__(
        self, policy: Mapping[str, Any], source: HuggingFaceSource, runtime: DeviceRuntime, *, seed: int = 0, with_optimizer: bool = True
    ) -> None:
        self.policy = policy
        self.runtime = runtime
        self._dtype = _dtype(policy["precision"])
        self._trusts = policy["trust_remote_code"]
        self.hf_config = read_hf_config(source.directory, trust_remote_code=self._trusts)
        if scores(policy):
            self.hf_config = scoring_config(self.hf_config)
            source = scoring_source(source, self.hf_config, seed)
        model = build_on_meta(self.hf_config, scores=scores(policy), trust_remote_code=self._trusts)
        if policy.get("activation_checkpointing_enabled"):
            recompute_layers(model)
        answer_requests(model.get_output_embeddings())
        fill = Filler(model, source, runtime.device)
        self.vocabulary = VocabularyShard(self.hf_config.get_text_config().vocab_size)
        self.shapes = Shapes(row_multiple=policy.get("make_sequence_length_divisible_by") or 1)
        self.groups = _data_parallel()
        self._generating: tuple[nn.Module, dict[str, tuple[Held, nn.Parameter]]] | None = None
        self.model: Sharded | FullModel
        if dist.get_world_size() > 1:
            self.model = Sharded(model, fill, self._dtype, runtime, offload=bool(policy.get("fsdp_offload_enabled")))
        else:
            if policy.get("fsdp_offload_enabled"):
                logger.warning("fsdp_offload_enabled: one rank alone has no FSDP around its model; nothing is offloaded")
            self.model = FullModel(model, fill, self._dtype, runtime)
        self._optimizer_copies = HostCopies(runtime)
        self._staging = StagingBuffers()
        self.optimizer: torch.optim.Optimizer | None = None
        self.scheduler: LRScheduler | None = None
        if with_optimizer:
            self._refuse_matrix_optimizer()
            self.optimizer = build_optimizer(policy, self.model.parameters(), self.model.dimensions)
            self.scheduler = build_scheduler(policy, self.optimizer)
        self.set_training(True)

    def _refuse_matrix_optimizer(self) -> None:
        name = str((self.policy.get("optimizer") or {}).get("name", ""))
        if self.groups.data_size > 1 and name.rpartition(".")[2] in NOT_ELEMENTWISE:
            bound = "its step needs whole matrices, and FSDP1 cuts them into flat pieces"
            raise ConfigError([Violation("policy.optimizer.name", name, bound, "write torch.optim.AdamW, or enable another backend")])

    @property
    def replicas_in_step(self) -> dist.ProcessGroup | None:
        """Every pass gathers parameters over them."""
        return self.groups.data if self.groups.data_size > 1 else None

    def forward_backward(self, inputs: Sequence[ModelInput], head: Head, *, backward: bool) -> list[HeadOutput]:
        self.model.before_pass()
        try:
            return forward_backward(self.model.module, inputs, head, backward=backward)
        finally:
            self.model.after_pass()

    def set_training(self, training: bool) -> None:
        self.model.module.train(training)

    def is_training(self) -> bool:
        return bool(self.model.module.training)

    def zero_grad(self) -> None:
        for _, parameter in self.model.parameters():
            parameter.grad = None

    def apply_gradients(self, accepts: Callable[[float], bool]) -> StepOutcome:
        assert self.optimizer is not None, "built without an optimizer"
        gradients = [parameter.grad for _, parameter in self.model.parameters() if parameter.grad is not None]
        norm = float(self.model.sum_over_ranks(squared_norm(gradients, self.runtime.device)).sqrt())
        if not accepts(norm):
            return StepOutcome(norm, False)
        clip(gradients, norm, self.policy.get("max_grad_norm"))
        self.optimizer.step()
        return StepOutcome(norm, True)

    def lr_step(self) -> None:
        if self.scheduler is not None:
            self.scheduler.step()

    def schedule_values(self) -> dict[str, float]:
        return schedule_values(self.optimizer) if self.optimizer is not None else {}

    def parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        return self.model.parameters()

    def sync_parameters(self) -> None:
        """Every pass gathers the parameters for itself and lets them go again; nothing is ever under way."""

    def parameters_changed(self) -> None:
        """The next pass reads the parameters anew."""

    def export_hf(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Names and full tensors in ``policy.precision``, which is what the model computes with."""
        names = in_sending_order(self.model.dimensions, self.hf_config)
        return ((name, tensor.to(self._dtype)) for name, tensor in self.model.full_tensors(names))

    def export_stage(self) -> Iterator[tuple[str, torch.Tensor]]:
        """All of it: there is one stage."""
        return self.export_hf()

    def agree_on_slices(self, wanted: Sequence[Slices], beside: int) -> Mapping[str, Slice]:
        """None: all weights are gathered."""
        return {}

    def export_slices(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Whole weights."""
        return self.export_hf()

    @property
    def gathered_bytes(self) -> int:
        """Not bounded: a layer is gathered, whatever it takes."""
        return 0

    def names_by_stage(self) -> Sequence[Sequence[str]]:
        """None: there is one stage."""
        return ()

    @torch.no_grad()
    def generate(self, data: Mapping[str, Any], config: Mapping[str, Any], tokenizer: Any, *, greedy: bool) -> BatchedDataDict[Any]:
        """Continue prompts; see ``decode``.

        The weights are gathered once, into a model of their own in ``policy.precision``, so that ranks with more or longer rows need not
        wait for the others.
        """
        if isinstance(self.model, FullModel):
            self.model.before_pass()
            return generate(self.model.module, self, data, config, tokenizer, greedy=greedy)
        with self._gathered() as model:
            return generate(model, self, data, config, tokenizer, greedy=greedy)

    @contextlib.contextmanager
    def _gathered(self) -> Iterator[nn.Module]:
        """A plain transformers model with the present weights. Afterwards it keeps its modules, which take a while to make, and no
        weights."""
        if self._generating is None:
            model = build_on_meta(self.hf_config, trust_remote_code=self._trusts)
            self._generating = model, {name: (held, held.get()) for name, held in held_by(model).items()}
        model, places = self._generating
        try:
            for name, tensor in self.export_hf():
                places[name][0].put(nn.Parameter(tensor, requires_grad=False))
            yield model.to(self.runtime.device)
        finally:
            for held, empty in places.values():
                held.put(empty)

    def move(self, part: Part, place: Place) -> None:
        """See the protocol. Gradients are not kept: they are let go of on the way to the host."""
        if not self.runtime.is_cuda:
            return
        if part == "parameters":
            self.model.move(place)
        elif part == "gradients":
            self.zero_grad()
        elif self.optimizer is not None and not self.model.offloads:
            if place == "host":
                self._optimizer_copies.take(functools.partial(move_optimizer, self.optimizer))
            else:
                move_optimizer(self.optimizer, lambda tensor: tensor.to(self.runtime.device, non_blocking=True))
        self.runtime.synchronize()

    def save(self, weights: Path, optimizer: Path | None) -> None:
        trained = require_optimizer(self.optimizer) if optimizer is not None else None
        checkpoint.save_weights(self.model.state(), weights, self._staging.of(weights))
        if optimizer is not None and trained is not None:
            assert self.scheduler is not None, "built with the optimizer"
            state, schedule = self.model.optimizer_state(trained), saved_schedule(self.policy, self.scheduler)
            checkpoint.save_optimizer(state, schedule, self.runtime, optimizer, self._staging.of(optimizer))

    def require_loadable(self, weights: Path, optimizer: Path | None) -> None:
        checkpoint.require(weights)
        if optimizer is not None:
            require_optimizer(self.optimizer)
            checkpoint.require(optimizer)

    def load(self, weights: Path, optimizer: Path | None) -> None:
        trained = require_optimizer(self.optimizer) if optimizer is not None else None
        state = self.model.state()
        checkpoint.load_weights(state, weights)
        self.model.load_state(state)
        if optimizer is not None and trained is not None:
            loaded, schedule = checkpoint.load_optimizer(state, self.runtime, optimizer)
            self.model.load_optimizer_state(trained, loaded)
            assert self.scheduler is not None, "built with the optimizer"
            self.scheduler = resume_schedule(self.policy, self.scheduler, schedule)

    def close(self) -> None:
        """Give the memory of staged checkpoints back, and destroy the groups of one."""
        self._staging.close()
        if dist.is_initialized() and self.groups.data_size > 1:
            dist.destroy_process_group(self.groups.tensor)


def _dtype(precision: str) -> torch.dtype:
    if precision not in PRECISIONS:
        bound = "FSDP1 computes in float32 or bfloat16; it has no loss scaling"
        raise ConfigError([Violation("policy.precision", precision, bound, "write bfloat16, or enable another backend")])
    return dtype_of(precision, "policy.precision")


def _data_parallel() -> ParallelGroups:
    """Every rank a data-parallel replica of its own."""
    everyone = dist.group.WORLD
    assert everyone is not None, "torch.distributed is initialised before a backend is built"
    alone: dist.ProcessGroup = everyone
    if dist.get_world_size() > 1:
        alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    return ParallelGroups(tensor=alone, context=alone, data=everyone, pipeline=alone)


def move_optimizer(optimizer: torch.optim.Optimizer, move: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Put what has a parameter's shape where ``move`` puts a tensor; counters are where the optimizer wants them."""
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            if isinstance(value, torch.Tensor) and value.shape == parameter.shape:
                state[key] = move(value)
