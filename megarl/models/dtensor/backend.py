"""The DTensor backend: the engine's ``Backend`` protocol on transformers models, divided by DTensor and FSDP2."""

from __future__ import annotations

import contextlib
import functools
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LRScheduler

from converters.checkpoint.source import HuggingFaceSource
from converters.families.hf_config import read_hf_config
from megarl.checkpoint.staging import StagingBuffers
from megarl.config.arithmetic import padded_vocabulary, sequence_share
from megarl.config.backend import scores
from megarl.distributed.batched_data_dict import BatchedDataDict
from megarl.distributed.device import DeviceRuntime
from megarl.errors import ModelError
from megarl.models.dtensor.gradients import LossScale, global_norm, local_gradients, refuse_optimizer_without_steps
from megarl.models.dtensor.mesh import build_meshes
from megarl.models.dtensor.mover import move_model, move_optimizer
from megarl.models.dtensor.parallelize import (
    divide_over_tensor_ranks,
    give_memory,
    reduced_once,
    reshard,
    shard_fully,
    take_memory,
    whole_parameters,
)
from megarl.models.dtensor.plans import choose_plan
from megarl.models.dtensor.shards import EvenState, gather_parts, read_block
from megarl.models.dtensor.styles import computes_locally
from megarl.models.dtensor.weight_stream import WeightStream
from megarl.models.engine.backend import Part, Place, StepOutcome, require_optimizer
from megarl.models.engine.heads import Head, HeadOutput
from megarl.models.engine.logprobs import VocabularyShard
from megarl.models.engine.microbatches import Shapes
from megarl.models.engine.model_input import ModelInput
from megarl.models.engine.offload_state import HostCopies
from megarl.models.engine.output_layer import answer_requests
from megarl.models.engine.precision import dtype_of
from megarl.models.engine.scoring import scoring_config, scoring_source
from megarl.models.huggingface import checkpoint
from megarl.models.huggingface.generation import generate
from megarl.models.huggingface.loading import build_on_meta, check_names, is_tied, persistent_buffers, recompute_layers
from megarl.models.huggingface.optimizer import (
    build_optimizer,
    build_scheduler,
    clip,
    resume_schedule,
    saved_schedule,
    schedule_values,
)
from megarl.models.huggingface.passes import forward_backward
from megarl.models.huggingface.sending_order import in_sending_order
from megarl.weight_sync.manifest import BUCKETS, bucket_bytes
from megarl.weight_sync.slices import Slice, Slices

logger = logging.getLogger(__name__)
# where the loss scale stands in a checkpoint: among the hyperparameters of the first group
SCALE_KEYS = ("loss_scale", "loss_scale_clean_steps")


class DTensorBackend:
    """One worker's part of a transformers model, with its optimizer and schedule.

    Kept parameters, gradients and optimizer state are float32; the model computes in ``policy.precision``, with dynamic loss scaling in
    float16.

    Args:
        policy: the policy configuration, already validated.
        source: Hugging Face weights to start from.
        runtime: device of this process; torch.distributed is initialised on its backend.
        seed: of a new score layer.
        with_optimizer: False for a model that is only read.

    Raises:
        ConfigError: the layout, the plan, the precision, the optimizer or the schedule is not possible here.
        ModelError: the model's config and weights do not fit together, or transformers cannot let it score.
    """

    def __init__(
        self, policy: Mapping[str, Any], source: HuggingFaceSource, runtime: DeviceRuntime, *, seed: int = 0, with_optimizer: bool = True
    ) -> None:
        self.policy = policy
        self.runtime = runtime
        self._settings = policy["dtensor_cfg"]
        self._dtype = dtype_of(policy["precision"], "policy.precision")
        self._offloads = bool(self._settings.get("cpu_offload")) and runtime.is_cuda
        if self._settings.get("cpu_offload") and not self._offloads:
            logger.info("cpu_offload: on a CPU all memory is host memory; nothing is offloaded")
        self._trusts = policy["trust_remote_code"]
        self.hf_config = read_hf_config(source.directory, trust_remote_code=self._trusts)
        if scores(policy):
            self.hf_config = scoring_config(self.hf_config)
            source = scoring_source(source, self.hf_config, seed)
        context, tensor = self._settings.get("context_parallel_size") or 1, self._settings.get("tensor_parallel_size") or 1
        self._sequence_parallel = bool(self._settings.get("sequence_parallel")) and tensor > 1
        ring = self._settings.get("context_parallel_comm_type") == "p2p"
        self._meshes = build_meshes(runtime.device.type, context=context, tensor=tensor, ring=ring)
        self.groups = self._meshes.groups
        share = sequence_share(tensor, context, self._sequence_parallel)
        self.shapes = Shapes(math.lcm(share, policy.get("make_sequence_length_divisible_by") or 1), share)
        self._true_vocabulary = self.hf_config.get_text_config().vocab_size
        self._vocabulary_rows = padded_vocabulary(self._true_vocabulary, tensor)
        self.vocabulary = VocabularyShard(
            self._true_vocabulary,
            self.groups.tensor_rank * (self._vocabulary_rows // tensor),
            self.groups.tensor if tensor > 1 else None,
        )
        self._generating: Any = None
        self.model = self._build(source)
        self._bucket_bytes = bucket_bytes(policy.get("refit_buffer_size_gb"))
        self._weights = WeightStream(
            in_sending_order(self._divided(), self.hf_config),
            self._rows,
            self._dtype,
            runtime.device,
            self._bucket_bytes,
            tensor_rank=self.groups.tensor_rank,
            tensor_size=tensor,
        )
        self.loss_scale = LossScale.for_float16() if self._dtype is torch.float16 else LossScale()
        self._optimizer_copies = HostCopies(runtime)
        self._staging = StagingBuffers()
        self.optimizer: torch.optim.Optimizer | None = None
        self.scheduler: LRScheduler | None = None
        if with_optimizer:
            refuse_optimizer_without_steps(policy, self._divided())
            self.optimizer = build_optimizer(policy, self._parameters.items())
            self.scheduler = build_scheduler(policy, self.optimizer)
        self.set_training(True)

    def _build(self, source: HuggingFaceSource) -> Any:
        """The model with this rank's pieces of the weights."""
        model = self._undivided()
        if buffers := persistent_buffers(model):
            raise ModelError(f"{type(model).__name__} keeps {min(buffers)} in its checkpoints, which is no parameter; use another model")
        padded = {module.weight for module in (model.get_input_embeddings(), model.get_output_embeddings()) if module is not None}
        shapes = {
            name: (self._true_vocabulary if parameter in padded else parameter.shape[0], *parameter.shape[1:])
            for name, parameter in model.named_parameters()
        }
        check_names(source, shapes, tied=is_tied(model))
        self._rows = {name: shape[0] for name, shape in shapes.items()}
        if self.groups.tensor_size == 1:
            answer_requests(model.get_output_embeddings())
        else:
            plan = choose_plan(model, sequence_parallel=self._sequence_parallel, custom=self._settings.get("custom_parallel_plan"))
            divide_over_tensor_ranks(model, self._meshes.tensor, plan)
        # where there is nobody to reduce with, whole gradients take no more memory than this rank's part of them
        self._reduces_once = self._meshes.sharding.size() == 1 and not self._offloads
        self._stays_whole = self._reduces_once and self._dtype is torch.float32 and computes_locally(model)
        if self._settings.get("activation_checkpointing"):
            recompute_layers(model)
        shard_fully(model, self._meshes.sharding, self._dtype, offload=self._offloads, pin=self.runtime.is_cuda)
        give_memory(model, torch.device("cpu") if self._offloads else self.runtime.device)
        self._parameters: dict[str, nn.Parameter] = dict(model.named_parameters())
        for name, parameter in self._divided().items():
            read_block(parameter, source, name)
        return model

    def _undivided(self) -> Any:
        rows, has_score = self._vocabulary_rows, scores(self.policy)
        return build_on_meta(self.hf_config, vocabulary=rows, scores=has_score, trust_remote_code=self._trusts)

    def _divided(self) -> dict[str, DTensor]:
        """The parameters as what they are now, each once. The model itself may show gathered ones in their place."""
        return {name: parameter for name, parameter in self._parameters.items() if isinstance(parameter, DTensor)}

    @property
    def replicas_in_step(self) -> dist.ProcessGroup | None:
        """Every pass gathers parameters over them."""
        return self.groups.data if self.groups.data_size > 1 else None

    def forward_backward(self, inputs: Sequence[ModelInput], head: Head, *, backward: bool) -> list[HeadOutput]:
        if self._stays_whole:
            with whole_parameters(self.model):
                return forward_backward(self.model, inputs, head, backward=backward)
        try:
            with reduced_once(self.model if self._reduces_once else None) as before_last:
                scale = self.loss_scale.factor
                return forward_backward(self.model, inputs, head, backward=backward, loss_scale=scale, before_last=before_last)
        except BaseException:
            # torch below 2.13 has no way back from a pass that was broken off
            getattr(self.model, "reset_iter_state", lambda: None)()
            raise
        finally:
            # a pass without backward leaves the outermost parameters gathered, and the next one would not see what was written meanwhile
            reshard(self.model)

    def set_training(self, training: bool) -> None:
        self.model.train(training)

    def is_training(self) -> bool:
        return bool(self.model.training)

    def zero_grad(self) -> None:
        for parameter in self._parameters.values():
            parameter.grad = None

    def apply_gradients(self, accepts: Callable[[float], bool]) -> StepOutcome:
        assert self.optimizer is not None, "built without an optimizer"
        parameters, factor = self._divided().values(), self.loss_scale.factor
        norm = global_norm(parameters, self.groups.tensor_rank, self.runtime.device) / factor
        if not self.loss_scale.accepts(norm):
            return StepOutcome(norm, False, overflowed=factor > 1.0)
        if not accepts(norm):
            return StepOutcome(norm, False)
        gradients = local_gradients(parameters)
        if factor != 1.0:
            for gradient in gradients:
                gradient.mul_(1.0 / factor)
        clip(gradients, norm, self.policy.get("max_grad_norm"))
        self.optimizer.step()
        return StepOutcome(norm, True)

    def lr_step(self) -> None:
        if self.scheduler is not None:
            self.scheduler.step()

    def schedule_values(self) -> dict[str, float]:
        return schedule_values(self.optimizer) if self.optimizer is not None else {}

    def parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Views of this rank's pieces; writing into them writes into the model."""
        for name, parameter in self._divided().items():
            yield name, nn.Parameter(parameter.to_local().detach(), requires_grad=parameter.requires_grad)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The divided parameters by name, vocabulary padding included."""
        return {name: parameter.detach() for name, parameter in self._divided().items()}

    def sync_parameters(self) -> None:
        """Every pass gathers the parameters for itself and lets them go again; nothing is ever under way."""

    def parameters_changed(self) -> None:
        """The next pass reads the parameters anew."""

    def export_hf(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Names and full tensors in ``policy.precision``, which is what the model computes with."""
        return self._weights.of(self._divided())

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
        """Buckets of an export that are there at once."""
        return BUCKETS * self._bucket_bytes

    def names_by_stage(self) -> Sequence[Sequence[str]]:
        """None: there is one stage."""
        return ()

    @torch.no_grad()
    def generate(self, data: Mapping[str, Any], config: Mapping[str, Any], tokenizer: Any, *, greedy: bool) -> BatchedDataDict[Any]:
        """Continue prompts; see ``decode``.

        The weights are gathered once over data and context parallel ranks, into a model of their own, so that ranks with more or longer
        rows need not wait for the others. Single positions cannot be divided: it has no sequence parallelism. Where there is nothing to
        gather, the model itself generates.
        """
        if self._stays_whole and not self._sequence_parallel and not self._settings.get("activation_checkpointing"):
            with whole_parameters(self.model):
                return generate(self.model, self, data, config, tokenizer, greedy=greedy)
        with self._gathered() as model:
            return generate(model, self, data, config, tokenizer, greedy=greedy)

    @contextlib.contextmanager
    def _gathered(self) -> Iterator[Any]:
        """A model in ``policy.precision`` that is divided over tensor-parallel ranks alone, with the present weights. Afterwards it keeps
        its modules, which take a while to make, and no memory."""
        if self._generating is None:
            self._generating = self._to_generate()
        model = self._generating
        give_memory(model, self.runtime.device)
        try:
            parameters = dict(model.named_parameters())
            divided = {name: parameter for name, parameter in self._divided().items() if name in parameters}
            for name, part in gather_parts(divided, self._dtype, self.runtime.device, self._bucket_bytes):
                own = parameters[name]
                (own.to_local() if isinstance(own, DTensor) else own).copy_(part)
            yield model
        finally:
            take_memory(model)

    def _to_generate(self) -> Any:
        """That model on the meta device. Its buffers are those of training, whatever the precision of its parameters: rounded to it, the
        frequencies of a rotary embedding would be others."""
        model = self._undivided()
        for parameter in model.parameters():
            parameter.data = parameter.data.to(self._dtype)
        if self.groups.tensor_size > 1:
            custom = None if self._sequence_parallel else self._settings.get("custom_parallel_plan")
            divide_over_tensor_ranks(model, self._meshes.tensor, choose_plan(model, sequence_parallel=False, custom=custom))
        return model

    def move(self, part: Part, place: Place) -> None:
        """See the protocol. Gradients are not kept: they are let go of on the way to the host."""
        if not self.runtime.is_cuda or self._offloads:
            return
        target = self.runtime.device if place == "device" else torch.device("cpu")
        if part == "parameters":
            move_model(self.model, target)
        elif part == "gradients":
            self.zero_grad()
        elif self.optimizer is not None:
            if place == "host":
                self._optimizer_copies.take(functools.partial(move_optimizer, self.optimizer))
            else:
                move_optimizer(self.optimizer, lambda tensor: tensor.to(target, non_blocking=True))
        self.runtime.synchronize()

    def save(self, weights: Path, optimizer: Path | None) -> None:
        trained = require_optimizer(self.optimizer) if optimizer is not None else None
        even = EvenState(self._rows, self.runtime.device)
        checkpoint.save_weights(even.cut(self._divided()), weights, self._staging.of(weights))
        if optimizer is not None and trained is not None:
            assert self.scheduler is not None, "built with the optimizer"
            state = even.cut_optimizer(checkpoint.named_optimizer_state(trained, self._parameters.items()))
            if self.loss_scale.dynamic:
                state["param_groups"][0].update(zip(SCALE_KEYS, (self.loss_scale.factor, self.loss_scale.clean_steps), strict=True))
            checkpoint.save_optimizer(
                state, saved_schedule(self.policy, self.scheduler), self.runtime, optimizer, self._staging.of(optimizer)
            )

    def require_loadable(self, weights: Path, optimizer: Path | None) -> None:
        checkpoint.require(weights)
        if optimizer is not None:
            require_optimizer(self.optimizer)
            checkpoint.require(optimizer)

    def load(self, weights: Path, optimizer: Path | None) -> None:
        trained = require_optimizer(self.optimizer) if optimizer is not None else None
        even = EvenState(self._rows, self.runtime.device)
        divided = self._divided()
        state = even.cut(divided)
        checkpoint.load_weights(state, weights)
        even.write(state, divided)
        if optimizer is not None and trained is not None:
            loaded, schedule = checkpoint.load_optimizer(state, self.runtime, optimizer)
            factor, clean_steps = (loaded["param_groups"][0].pop(key, None) for key in SCALE_KEYS)
            if self.loss_scale.dynamic and factor is not None:
                self.loss_scale.factor, self.loss_scale.clean_steps = factor, clean_steps
            checkpoint.install_optimizer_state(trained, self._parameters.items(), even.divide_optimizer(loaded, divided))
            assert self.scheduler is not None, "built with the optimizer"
            self.scheduler = resume_schedule(self.policy, self.scheduler, schedule)

    def close(self) -> None:
        """Give the memory of staged checkpoints back. The process groups go with torch's default group."""
        self._staging.close()
