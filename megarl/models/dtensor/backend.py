"""The DTensor backend: the engine's ``Backend`` protocol on transformers models sharded by DTensor and
FSDP2."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from converters.checkpoint.source import HuggingFaceSource
from megarl.config.arithmetic import padded_vocabulary, sequence_share
from megarl.config.backend import scores
from megarl.config.nested import at
from megarl.errors import ConfigError, Violation
from megarl.models.dtensor.adapters import AdaptedLinear, Adapters
from megarl.models.dtensor.mesh import build_meshes
from megarl.models.dtensor.parallelize import (
    divide_over_tensor_ranks,
    frozen_shards,
    give_memory,
    reduced_once,
    reshard,
    shard_fully,
    take_memory,
    whole_parameters,
)
from megarl.models.dtensor.plans import choose_plan
from megarl.models.dtensor.shards import DividedParameters, block_of, gather_parts, read_block
from megarl.models.dtensor.styles import computes_locally
from megarl.models.dtensor.weight_stream import WeightStream
from megarl.models.engine.adapters import AdapterConfig, AdapterExport, AdapterSettings
from megarl.models.engine.heads import Head, HeadOutput
from megarl.models.engine.logprobs import VocabularyShard
from megarl.models.engine.low_precision_adam import add_to_sum
from megarl.models.engine.microbatches import Shapes
from megarl.models.engine.model_input import ModelInput
from megarl.models.engine.output_layer import answer_requests
from megarl.models.huggingface.backend import HuggingFaceBackend
from megarl.models.huggingface.loading import build_on_meta, check_fits, recompute_layers
from megarl.models.huggingface.optimizer import OPTIMIZER, LossScale, build_optimizer
from megarl.models.huggingface.passes import forward_backward
from megarl.models.huggingface.sending_order import in_sending_order
from megarl.weight_sync.manifest import BUCKETS, bucket_bytes
from megarl.weight_sync.plan import WeightIterator

logger = logging.getLogger(__name__)
STEPS = 2  # The first step creates the optimizer state, the second reads it.


class DTensorBackend(HuggingFaceBackend):
    """A model sharded by DTensor and FSDP2, with dynamic loss scaling in float16."""

    adapters: Adapters | None = None

    def _build(self, source: HuggingFaceSource) -> None:
        self._settings = self.policy["dtensor_cfg"]
        self.offloads = self._settings["cpu_offload"] and self.runtime.is_cuda
        if self._settings["cpu_offload"] and not self.offloads:
            logger.info("cpu_offload: on a CPU all memory is host memory; nothing is offloaded")
        context, tensor = self._settings["context_parallel_size"], self._settings["tensor_parallel_size"]
        self._sequence_parallel = self._settings["sequence_parallel"] and tensor > 1
        ring = self._settings["context_parallel_comm_type"] == "p2p"
        self._meshes = build_meshes(self.runtime.device.type, context=context, tensor=tensor, ring=ring)
        self.groups = self._meshes.groups
        share = sequence_share(tensor, context, self._sequence_parallel)
        self.shapes = Shapes(math.lcm(share, self.policy["make_sequence_length_divisible_by"]), share)
        # Checkpoints and exports have the true size, without the padded rows.
        self._true_vocabulary = self.hf_config.get_text_config().vocab_size
        self._vocabulary_rows = padded_vocabulary(self._true_vocabulary, tensor)
        self.vocabulary = VocabularyShard(
            self._true_vocabulary,
            self.groups.tensor_rank * (self._vocabulary_rows // tensor),
            self.groups.tensor if tensor > 1 else None,
        )
        self._generating: Any = None
        self.model = self.module = self._divided_model(source)
        self._store = DividedParameters(self.model, self._saved(), self._rows, self.runtime.device)
        self._bucket_bytes = bucket_bytes(self.policy["refit_buffer_size_gb"])
        self._weights = WeightStream(
            # Megatron's order, so that a refit manifest does not depend on the backend.
            in_sending_order(self._own(), self.hf_config),
            self._rows,
            self._dtype,
            self.runtime.device,
            self._bucket_bytes,
            tensor_rank=self.groups.tensor_rank,
            tensor_size=tensor,
        )
        if self._dtype is torch.float16:
            self.loss_scale = LossScale.for_float16()

    def _refuse_optimizer(self) -> None:
        """Check that the optimizer can step on sharded parameters. Collective over all ranks.

        Some optimizer operations do not support DTensors, or only if all are on one mesh. The check steps on
        a copy of the smallest parameter of each kind of sharding.

        Raises:
            ConfigError: a step failed.
        """
        smallest: dict[Any, DTensor] = {}
        for parameter in self._divided().values():
            way = (parameter.device_mesh, parameter.placements, parameter.ndim)
            if parameter.requires_grad and (way not in smallest or parameter.numel() < smallest[way].numel()):
                smallest[way] = parameter
        # Step on copies, because a step would change the model's own parameters.
        stand_ins = [nn.Parameter(torch.ones_like(parameter.detach())) for parameter in smallest.values()]
        optimizer = build_optimizer(
            self.policy, ((str(number), parameter) for number, parameter in enumerate(stand_ins))
        )
        for stand_in in stand_ins:
            stand_in.grad = torch.ones_like(stand_in.detach())
        try:
            for _ in range(STEPS):
                optimizer.step()
        except Exception as error:
            # Catch every error: an operation without DTensor support may raise any class.
            reason = (
                f"its step fails on parameters that DTensor divides ({type(error).__name__}: "
                f"{str(error).splitlines()[0]})"
            )
            fix = "leave out fused and foreach, or write name: torch.optim.AdamW"
            raise ConfigError(
                [Violation(OPTIMIZER, dict(at(self.policy, OPTIMIZER.removeprefix("policy."))), reason, fix)]
            ) from error

    def _divided_model(self, source: HuggingFaceSource) -> Any:
        """Build the model with this rank's shards of the weights."""
        model = self._undivided()
        # Collect in a set, because tied embeddings are one parameter.
        padded = set()
        for module in (model.get_input_embeddings(), model.get_output_embeddings()):
            if module is not None:
                padded.add(module.weight)
        shapes = {
            name: (self._true_vocabulary if parameter in padded else parameter.shape[0], *parameter.shape[1:])
            for name, parameter in model.named_parameters()
        }
        check_fits(model, source, shapes)
        settings = AdapterSettings.of(self.policy)
        if settings is not None:
            self.adapters = Adapters(settings, model, self._seed)
        for parameter in model.parameters():
            # Store frozen parameters in the computation's dtype; higher precision would never be used.
            kept = self._kept_dtype if parameter.requires_grad else self._dtype
            parameter.data = parameter.data.to(kept)
        self._rows = {name: parameter.shape[0] for name, parameter in model.named_parameters()} | {
            name: shape[0] for name, shape in shapes.items()
        }
        for name in () if self.adapters is None else self.adapters.rows_of_vocabulary:
            self._rows[name] = self._true_vocabulary
        if self.groups.tensor_size == 1:
            output = model.get_output_embeddings()
            answer_requests(output, low_rank=output.low_rank if isinstance(output, AdaptedLinear) else None)
        else:
            plan = choose_plan(
                model,
                sequence_parallel=self._sequence_parallel,
                custom=self._settings["custom_parallel_plan"],
            )
            divide_over_tensor_ranks(model, self._meshes.tensor, plan)
        # With a single sharding rank, full gradients take no more memory than this rank's shard of them.
        self._reduces_once = self._meshes.sharding.size() == 1 and not self.offloads
        self._stays_whole = self._reduces_once and self._dtype is torch.float32 and computes_locally(model)
        if self._settings["activation_checkpointing"]:
            # Before FSDP2 wraps the layers: checkpointing must be inside the code that gathers parameters.
            recompute_layers(model)
        shard_fully(
            model, self._meshes.sharding, self._dtype, offload=self.offloads, pin=self.runtime.is_cuda
        )
        # Allocate after sharding, so that no rank ever holds the full model.
        give_memory(model, torch.device("cpu") if self.offloads else self.runtime.device)
        # Keep references to the parameters, because FSDP2 replaces them by gathered tensors during a pass.
        self._parameters = dict(model.named_parameters())
        self.load_hf(source)
        if self.adapters is not None:
            self.adapters.fill(self._divided(), self._rows)
        if self._kept_dtype is not torch.float32:
            for parameter in self._divided().values():
                if parameter.requires_grad:
                    parameter.register_post_accumulate_grad_hook(add_to_sum)
        return model

    def load_hf(self, source: HuggingFaceSource) -> None:
        for name, parameter in self._own().items():
            read_block(parameter, source, name)

    def copied_parameters(self) -> WeightIterator:
        """Yield the parameters that are replicated on every tensor-parallel rank; see ``TakesWeights``."""
        for name, weight in self._divided().items():
            if block_of(weight).tensor_dimension is None:
                yield name, weight.to_local()

    def _undivided(self) -> Any:
        rows, has_score = self._vocabulary_rows, scores(self.policy)
        return build_on_meta(
            self.hf_config, vocabulary=rows, scores=has_score, trust_remote_code=self._trusts
        )

    def _divided(self) -> dict[str, DTensor]:
        """Return each sharded parameter once, by name. During a pass the model itself may hold gathered ones
        instead."""
        return {
            name: parameter for name, parameter in self._parameters.items() if isinstance(parameter, DTensor)
        }

    def _own(self) -> dict[str, DTensor]:
        """Return the base model's parameters, without adapters."""
        adapters, divided = self.adapters, self._divided()
        return (
            divided
            if adapters is None
            else {name: each for name, each in divided.items() if not adapters.is_factor(name)}
        )

    def _saved(self) -> dict[str, DTensor]:
        """Return the parameters that checkpoints contain; with adapters, only the trained ones."""
        return (
            self._divided()
            if self.adapters is None
            else {name: each for name, each in self._divided().items() if each.requires_grad}
        )

    def forward_backward(
        self, inputs: Sequence[ModelInput], head: Head, *, backward: bool
    ) -> list[HeadOutput]:
        if self._stays_whole:
            with whole_parameters(self.model):
                return forward_backward(self.model, inputs, head, backward=backward)
        try:
            with reduced_once(self.model if self._reduces_once else None) as before_last:
                scale = self.loss_scale.factor
                return forward_backward(
                    self.model, inputs, head, backward=backward, loss_scale=scale, before_last=before_last
                )
        except BaseException:
            # torch before 2.13 cannot reset the state of an interrupted pass.
            getattr(self.model, "reset_iter_state", lambda: None)()
            raise
        finally:
            # A pass without backward leaves the outermost parameters gathered, and the next pass would not
            # see changes made in between.
            reshard(self.model)

    def _counted(self) -> Iterable[nn.Parameter]:
        """Return the parameters that this rank contributes to the gradient norm: replicated ones only on the
        first tensor-parallel rank."""
        first, divided = self.groups.tensor_rank == 0, self._divided()
        return [
            self._parameters[name]
            for name, each in divided.items()
            if first or block_of(each).tensor_dimension is not None
        ]

    def parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield views of this rank's shards; writing to them changes the model."""
        for name, parameter in self._divided().items():
            yield name, nn.Parameter(parameter.to_local().detach(), requires_grad=parameter.requires_grad)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return the sharded parameters by name, including vocabulary padding."""
        return {name: parameter.detach() for name, parameter in self._divided().items()}

    def frozen(self) -> dict[str, Sequence[torch.Tensor]]:
        """Return the tensors of frozen shards; see ``SharesFrozen``.

        Empty on a CUDA device, where each offload allocates new host memory, and if FSDP keeps shards in host
        memory.
        """
        return {} if self.runtime.is_cuda or self.offloads else frozen_shards(self.model)

    def export_hf(self) -> WeightIterator:
        divided = self._divided()
        pieces: Mapping[str, torch.Tensor] = {
            name: each.to_local().detach() for name, each in divided.items()
        }
        if self.adapters is not None:
            pieces = self.adapters.exported(divided, self.runtime.device, self._bucket_bytes)
        return self._weights.of(divided, pieces)

    def export_adapters(self) -> AdapterExport | None:
        adapters = self.adapters
        return (
            None
            if adapters is None
            else (adapters.as_peft(), adapters.gathered(self._divided(), self._rows, self.runtime.device))
        )

    def _as_peft(self) -> AdapterConfig | None:
        return None if self.adapters is None else self.adapters.as_peft()

    def without_adapters(self) -> contextlib.AbstractContextManager[None] | None:
        return None if self.adapters is None else self.adapters.switch.off()

    @property
    def gathered_bytes(self) -> int:
        """Bytes of the export buckets that exist at the same time."""
        return BUCKETS * self._bucket_bytes

    @contextlib.contextmanager
    def _generating_model(self) -> Iterator[Any]:
        """Yield a model for generation, without sequence parallelism, because a single position cannot be
        split."""
        if (
            self._stays_whole
            and not self._sequence_parallel
            and not self._settings["activation_checkpointing"]
        ):
            with whole_parameters(self.model):
                yield self.model
        else:
            with self._gathered() as model:
                yield model

    @contextlib.contextmanager
    def _gathered(self) -> Iterator[Any]:
        """Yield a model in ``policy.precision`` with the current weights, sharded only over tensor-parallel
        ranks.

        On exit its memory is freed, but the modules are kept, because building them takes long.
        """
        if self._generating is None:
            self._generating = self._to_generate()
        model = self._generating
        give_memory(model, self.runtime.device)
        try:
            parameters = dict(model.named_parameters())
            divided = self._divided()
            factors = (
                {}
                if self.adapters is None
                else self.adapters.parts(divided, self.runtime.device, self._bucket_bytes)
            )
            divided = {name: parameter for name, parameter in divided.items() if name in parameters}
            for name, part in gather_parts(divided, self._dtype, self.runtime.device, self._bucket_bytes):
                own = parameters[name]
                # Merge adapters for generation, which saves the adapters' matmuls in every layer and step.
                part = part if self.adapters is None else self.adapters.merged(name, part, factors)
                (own.to_local() if isinstance(own, DTensor) else own).copy_(part)
            yield model
        finally:
            take_memory(model)

    def _to_generate(self) -> Any:
        """Build the generation model on the meta device. Its buffers keep the training model's precision,
        because rounding would change the rotary frequencies."""
        model = self._undivided()
        for parameter in model.parameters():
            parameter.data = parameter.data.to(self._dtype)
        if self.groups.tensor_size > 1:
            custom = None if self._sequence_parallel else self._settings["custom_parallel_plan"]
            divide_over_tensor_ranks(
                model, self._meshes.tensor, choose_plan(model, sequence_parallel=False, custom=custom)
            )
        return model
