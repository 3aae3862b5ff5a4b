"""The Megatron backend: the engine's ``Backend`` protocol on Megatron-Core, and moves of the model between
device and host memory."""

from __future__ import annotations

import contextlib
import functools
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from converters.check import check_source
from converters.checkpoint.artifacts import HF_DIRECTORY
from converters.checkpoint.source import HuggingFaceSource
from converters.families.hf_config import read_hf_config
from converters.families.read import read_architecture
from converters.mapping.rule import Kind
from converters.mapping.rules import rule_for
from converters.model_config.architecture import Architecture
from converters.model_config.prediction_layers import as_stored
from converters.untouched import Untouched
from megarl.checkpoint.adapter_base import BaseModel, refuse_adapters
from megarl.checkpoint.staging import StagingBuffers
from megarl.config.arithmetic import sequence_share
from megarl.config.backend import scores
from megarl.config.layout import pipeline_chunks
from megarl.config.policy import PolicyConfig
from megarl.distributed.device import DeviceRuntime
from megarl.errors import StateError
from megarl.models.engine.adapters import AdapterExport, AdapterSettings
from megarl.models.engine.backend import Part, Place, StepOutcome, WriteModelFiles, require_optimizer
from megarl.models.engine.groups import ParallelGroups, share_random_state
from megarl.models.engine.heads import Head, HeadOutput
from megarl.models.engine.logprobs import VocabularyShard
from megarl.models.engine.low_precision_adam import HOST
from megarl.models.engine.microbatches import Shapes
from megarl.models.engine.model_input import ModelInput
from megarl.models.engine.nonfinite import on_all_ranks
from megarl.models.engine.offload_state import HostCopies
from megarl.models.engine.precision import dtype_of
from megarl.models.engine.scoring import scoring_config, scoring_source
from megarl.models.engine.shared_base import bytes_of
from megarl.models.megatron import checkpoint, cuda_redirect, hf_state, parallel
from megarl.models.megatron.adapters import Adapters
from megarl.models.megatron.build import build_chunks, wrap_for_data_parallel
from megarl.models.megatron.moe_passes import RecordedPasses, in_step
from megarl.models.megatron.optimizer import (
    build_optimizer,
    build_scheduler,
    finish_in_host_memory,
    schedule_values,
    step_where_accepted,
    with_parameters,
)
from megarl.models.megatron.schedule import answer_requests, forward_backward
from megarl.models.megatron.settings import balance_settings
from megarl.models.megatron.weight_stream import WeightStream
from megarl.patched import patched
from megarl.weight_sync.manifest import BUCKETS, bucket_bytes
from megarl.weight_sync.plan import WeightIterator
from megarl.weight_sync.slices import Slice, Slices


class Mover:
    """Moves parts of a model between device and host memory. On a CPU the two are the same and nothing is
    moved.

    Gradients are not kept: their buffer is freed on a move to the host and is zero after a move to the
    device.

    Args:
        chunks: the model chunks of this stage.
        optimizer: the chunks' optimizer; None for a model that is not trained.
        runtime: device of this process.
    """

    def __init__(
        self,
        chunks: Sequence[DistributedDataParallel],
        optimizer: MegatronOptimizer | None,
        runtime: DeviceRuntime,
    ) -> None:
        self._chunks, self._optimizer, self._runtime = chunks, optimizer, runtime
        self.loose = LooseParameters(chunks, runtime)
        self.optimizer_copies = HostCopies(runtime)

    def move(self, part: Part, place: Place) -> None:
        """Move ``part`` to ``place`` and wait until the copies are done."""
        if not self._runtime.is_cuda:
            return
        if part == "optimizer":
            if self._optimizer is not None:
                self._move_optimizer(self._optimizer, place)
        else:
            for chunk in self._chunks:
                _move_buffers(chunk, place, parameters=part == "parameters")
            if part == "parameters":
                self.loose.move(place)
        # Copies are asynchronous, and the caller next gives the memory to another process or counts it as
        # free.
        self._runtime.synchronize()

    def _move_optimizer(self, optimizer: MegatronOptimizer, place: Place) -> None:
        if place == "host":
            self.optimizer_copies.take(functools.partial(move_optimizer, optimizer))
        else:
            move_optimizer(optimizer, lambda tensor: tensor.to(self._runtime.device, non_blocking=True))


def move_optimizer(optimizer: MegatronOptimizer, move: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Replace each tensor of the optimizer state, and each float32 master weight, by the result of
    ``move``.

    Master weights are moved only if the optimizer owns them as parameters. A float32 model has none, and with
    state formats below float32 they are part of the state; the optimizer's parameters are then the model's,
    or views of their buffer, and move with the model. Megatron's ``offload_to_cpu`` would also move the
    model's weights, or read a buffer that is already freed. State that is kept in host memory stays there.
    """
    for inner in with_parameters(optimizer):
        if (
            inner.config.bf16 or inner.config.fp16
        ) and not inner.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8:
            for group in inner.optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.data = move(parameter.data)
        for state in inner.optimizer.state.values():
            for key, value in state.items():
                if isinstance(value, torch.Tensor) and not key.startswith(HOST):
                    # Replace the tensor itself: unlike for a weight, no hook or buffer refers to its memory.
                    state[key] = move(value)


def _move_buffers(model: DistributedDataParallel, place: Place, *, parameters: bool) -> None:
    for buffer in model.buffers + model.expert_parallel_buffers:
        # Megatron-Core's methods resize the storage, so that the parameters stay the same tensors.
        move = buffer.offload_to_cpu if place == "host" else buffer.reload_from_cpu
        move(move_params=parameters, move_grads=not parameters)


class LooseParameters:
    """The parameters outside Megatron-Core's buffers, which are moved off the device and back. Without the
    distributed optimizer these are all parameters.

    Their memory is freed while the tensor objects remain, as in Megatron-Core's buffers. Assigning a tensor
    on another device would give the parameter a new autograd node, without the hook by which data parallelism
    collects its gradient; the gradient would be zero from then on.

    Args:
        chunks: the model chunks of this stage.
        runtime: device of this process.
    """

    def __init__(self, chunks: Sequence[DistributedDataParallel], runtime: DeviceRuntime) -> None:
        self._chunks = chunks
        self._copies = HostCopies(runtime)
        self._away: list[torch.Tensor] = []
        # Host copies in shared memory of frozen storages; they are never written again. Keep a reference to
        # the storage, so that its id is not reused.
        self._shared: dict[int, tuple[torch.UntypedStorage, torch.Tensor]] = {}

    def move(self, place: Place) -> None:
        """Copy the parameters to the host and free their device memory, or allocate that memory and copy them
        back. Does not wait for the copies."""
        memories = self._memories()
        if place == "host":
            own = [memory for memory in memories if memory._cdata not in self._shared]
            copies = iter(self._copies.fill(list(map(bytes_of, own))))
            self._away = [
                self._shared[memory._cdata][1] if memory._cdata in self._shared else next(copies)
                for memory in memories
            ]
            for memory in memories:
                # Free the memory after the copies are queued on the same stream; the allocator then reuses it
                # only after them.
                memory.resize_(0)
            return
        for memory, copy in zip(memories, self._away, strict=True):
            # Resize the storage in place, so that parameters, views and hooks stay valid.
            memory.resize_(copy.nbytes)
            bytes_of(memory).copy_(copy, non_blocking=True)
        self._away = []

    def frozen(self) -> dict[str, Sequence[torch.Tensor]]:
        """Return the parameters of each storage that has only frozen parameters; see ``SharesFrozen``."""
        found: dict[int, list[torch.nn.Parameter]] = {}
        names: dict[int, str] = {}
        trained = set()
        for number, model in enumerate(self._chunks):
            for name, parameter in model.module.named_parameters():
                storage = parameter.untyped_storage()._cdata
                found.setdefault(storage, []).append(parameter)
                names.setdefault(storage, f"{number}.{name}")
                if parameter.requires_grad:
                    trained.add(storage)
        return {names[storage]: found[storage] for storage in found if storage not in trained}

    def keep_host_copy(self, tensor: torch.Tensor, memory: torch.Tensor) -> None:
        """Use shared memory as the host copy of a frozen storage; see ``SharesFrozen``."""
        storage = tensor.untyped_storage()
        self._shared[storage._cdata] = storage, memory

    def _memories(self) -> list[torch.UntypedStorage]:
        """Return the storages of the parameters outside Megatron-Core's buffers, each once, in the order of
        the parameters."""
        found: dict[int, torch.UntypedStorage] = {}
        for model in self._chunks:
            buffered: set[torch.nn.Parameter] = set()
            for buffer in model.buffers + model.expert_parallel_buffers:
                if buffer.param_data is not None:
                    buffered.update(buffer.params)
            for parameter in model.module.parameters():
                if parameter not in buffered:
                    memory = parameter.untyped_storage()
                    # Collect storages, because tied weights share one, which must be copied and freed once.
                    found.setdefault(memory._cdata, memory)
        return list(found.values())


logger = logging.getLogger(__name__)


class MegatronBackend:
    """One worker's shard of a model on Megatron-Core, with its optimizer and schedule.

    Args:
        policy: the validated policy configuration.
        source: Hugging Face weights to start from.
        runtime: device of this process; torch.distributed must be initialised on its backend.
        seed: seed of Megatron's random-number tracker and of a new score layer.
        with_optimizer: False for a model that is not trained.

    Raises:
        ConversionError: the model's config or weights cannot be converted.
        ModelError: transformers has no sequence-classification form of the model.
    """

    def __init__(
        self,
        policy: PolicyConfig,
        source: HuggingFaceSource,
        runtime: DeviceRuntime,
        *,
        seed: int,
        with_optimizer: bool = True,
    ) -> None:
        self.policy = policy
        self._staging = StagingBuffers()
        self.runtime = runtime
        self.hf_config = read_hf_config(source.directory, trust_remote_code=policy["trust_remote_code"])
        if scores(policy):
            self.hf_config = scoring_config(self.hf_config)
            source = scoring_source(source, self.hf_config, seed)
        ignored = policy["megatron_cfg"]["ignore_config_keys"]
        # _stored describes the model's files, including layers that are not trained; architecture describes
        # the built model.
        self._stored = as_stored(read_architecture(self.hf_config, ignored), source.names())
        # Multi-token-prediction layers and the vision tower do not influence log-probabilities of text, so
        # they are not built.
        self.architecture: Architecture = replace(self._stored, prediction_layers=0, vision=None)
        self.untouched = Untouched(source, self._stored)
        if dist.get_rank() == 0:
            self._say_what_is_not_trained()
        # Install the redirection before any Megatron-Core constructor, because these query torch.cuda.
        cuda_redirect.install()
        try:
            self._build(policy, source, seed, with_optimizer)
        # Clean up after KeyboardInterrupt too: otherwise process groups and patches would outlive the
        # constructor.
        except BaseException:
            self.close()
            raise
        self.set_training(True)

    def _say_what_is_not_trained(self) -> None:
        if str(self.untouched):
            logger.warning(
                "%s: not trained, and exported as it was: %s", self.untouched.directory, self.untouched
            )

    def _build(
        self, policy: PolicyConfig, source: HuggingFaceSource, seed: int, with_optimizer: bool
    ) -> None:
        """Build the process groups, the model with its weights, the optimizer and the schedule."""
        megatron = policy["megatron_cfg"]
        sizes = parallel.ParallelSizes(
            tensor=megatron["tensor_model_parallel_size"],
            pipeline=megatron["pipeline_model_parallel_size"],
            context=megatron["context_parallel_size"],
            virtual=pipeline_chunks(megatron),
            expert=megatron["expert_model_parallel_size"],
            expert_tensor=megatron["expert_tensor_parallel_size"],
            ring=megatron["context_parallel_comm_type"] == "p2p",
        )
        self.groups: ParallelGroups = parallel.initialize(sizes)
        self.experts = parallel.expert_groups(self.groups)
        self._equal_tokens = megatron["moe_token_dispatcher_type"] == "allgather"
        share = sequence_share(sizes.tensor, sizes.context, bool(megatron["sequence_parallel"]))
        # Packed sequences need only the parallel split: make_sequence_length_divisible_by applies to rows, as
        # in NeMo-RL.
        self.shapes = Shapes(
            math.lcm(share, policy["make_sequence_length_divisible_by"]), share, equal=sizes.pipeline > 1
        )
        # Only a few ranks compare the tied weights, because that reads two full matrices.
        check_source(
            source, self._stored, compare_tied=self.groups.is_first_stage and self.groups.tensor_rank == 0
        )
        with cuda_redirect.cuda_literals():
            parallel.seed_model_parallel(seed)
            stages = build_chunks(policy, self.architecture, self.groups)
            hf_state.load_from_hf(stages, source, self.architecture, self.groups, self.experts)
            settings = AdapterSettings.of(policy)
            self.base = BaseModel(source)
            self.adapters = (
                None
                if settings is None
                else Adapters(settings, self.architecture, self.groups, self.experts, seed)
            )
            if self.adapters is not None:
                # Add adapters before the data-parallel wrapper and the optimizer, which take the parameters
                # that exist then.
                self.adapters.put_beside(stages)
            if stages[-1].post_process and self.architecture.head is None:
                # Patch before the data-parallel wrapper, which only looks at parameters: the new forward is
                # an instance attribute.
                answer_requests(stages[-1].output_layer)
            self.chunks = wrap_for_data_parallel(stages, policy, self.groups)
            self.optimizer: MegatronOptimizer | None = (
                build_optimizer(policy, self.chunks, seed) if with_optimizer else None
            )
            self.scheduler: OptimizerParamScheduler | None = (
                build_scheduler(policy, self.optimizer) if self.optimizer else None
            )
        self._mover = Mover(self.chunks, self.optimizer, self.runtime)
        balance = balance_settings(policy, self.architecture)
        self._recorded = (
            RecordedPasses(self.chunks, balance, self.groups, self.experts, self.runtime.device)
            if balance
            else None
        )
        # The vocabulary is padded so that each rank has the same number of rows; the padding comes last.
        rows = stages[0].vocab_size // self.groups.tensor_size
        self.vocabulary = VocabularyShard(
            self.architecture.vocab_size,
            self.groups.tensor_rank * rows,
            self.groups.tensor if self.groups.tensor_size > 1 else None,
        )
        self._gathers_ahead = self.chunks[0].ddp_config.overlap_param_gather
        self._step_goes_on = False
        self._bucket_bytes = bucket_bytes(policy["refit_buffer_size_gb"])
        exported = {} if self.adapters is None else {"exported": self.adapters.exported}
        self._weights = WeightStream(
            stages, self.architecture, self.groups, self.experts, self._bucket_bytes, **exported
        )

    @property
    def stages(self) -> list[Any]:
        """The unwrapped models of this pipeline stage, one per chunk."""
        return [chunk.module for chunk in self.chunks]

    @property
    def replicas_in_step(self) -> dist.ProcessGroup | None:
        """Process group of the data-parallel replicas that share experts and must run in lockstep; None if
        there are none."""
        return self.experts.replicas

    def forward_backward(
        self, inputs: Sequence[ModelInput], head: Head, *, backward: bool
    ) -> list[HeadOutput]:
        # Required before passes without gradients too, because expert layers run collectives there as well.
        inputs = in_step(inputs, self.experts, self.shapes, equal_tokens=self._equal_tokens)
        if backward and self._recorded is not None:
            outputs = self._recorded.forward_backward(inputs, head)
        else:
            outputs = forward_backward(self.chunks, inputs, head, backward=backward)
        self._empty_cache(1)
        return outputs

    def set_training(self, training: bool) -> None:
        for chunk in self.chunks:
            chunk.train(training)

    def is_training(self) -> bool:
        return bool(self.chunks[0].training)

    def zero_grad(self) -> None:
        self._finish_step()
        # A training step starts here, so hooks may gather parameters during the forward pass again.
        self._resume_gathering_ahead()
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        if self.optimizer is not None:
            self.optimizer.zero_grad()

    def apply_gradients(self, accepts: Callable[[float], bool]) -> StepOutcome:
        assert self.optimizer is not None, "built without an optimizer"
        # The CPU may still be updating weights after step(), so their gather must wait for _finish_step.
        # Pretending that hooks gather them (overlap_param_gather) makes step() skip it. Decide by the
        # configuration, not by this rank's state: all ranks must agree, including one without state in host
        # memory.
        in_host = self.policy["megatron_cfg"]["optimizer"]["optimizer_offload_fraction"] > 0
        put_off = self.chunks[0].ddp_config, "overlap_param_gather", in_host or self._gathers_ahead
        with cuda_redirect.cuda_literals(), patched(put_off):
            outcome = step_where_accepted(self.optimizer, accepts)
        self._step_goes_on = in_host and outcome.stepped
        self._empty_cache(2)
        return replace(outcome, metrics=self._recorded.metrics()) if self._recorded is not None else outcome

    def _finish_step(self) -> None:
        """Wait for the part of the last step that runs on the CPU, then gather the weights as Megatron-Core
        would have done after the step.

        Collective if such a step is pending, so it must run in the main thread.

        Raises:
            Exception: the step failed on this rank; every later call raises it again.
            StateError: the step failed on another rank.
        """
        if not self._step_goes_on:
            return
        assert self.optimizer is not None, "it steps"
        failure: Exception | None = None
        try:
            finish_in_host_memory(self.optimizer)
        except Exception as error:
            failure = error
        # Agree before the gather: without this rank the others would wait in it until the timeout.
        if not on_all_ranks(failure is None, self.runtime.device):
            raise failure or StateError(
                "another rank failed in the optimizer step in host memory, see its own error: weights are "
                "those of half a step. Fix: continue from a checkpoint"
            )
        self._step_goes_on = False
        # With hooks, the weights are gathered before the next pass or by sync_parameters.
        for chunk in () if self._gathers_ahead else self.chunks:
            with cuda_redirect.cuda_literals():
                chunk.start_param_sync()

    def _empty_cache(self, level: int) -> None:
        """Free cached device memory if ``empty_unused_memory_level`` is at least ``level``; ``level`` is 1
        after a pass, 2 after a step."""
        if self.policy["megatron_cfg"]["empty_unused_memory_level"] >= level:
            self.runtime.empty_cache()

    def lr_step(self) -> None:
        if self.scheduler is not None:
            # The schedule counts train() calls, whereas Megatron-LM counts samples.
            self.scheduler.step(increment=1)

    def schedule_values(self) -> dict[str, float]:
        return schedule_values(self.optimizer) if self.optimizer is not None else {}

    def parameters(self) -> WeightIterator:
        return hf_state.parameters_of(self.stages, self.experts)

    def trainable(self) -> WeightIterator:
        for name, parameter in self.parameters():
            if parameter.requires_grad:
                yield name, parameter

    def copied_parameters(self) -> WeightIterator:
        """Yield the parameters that are replicated on every tensor-parallel rank; see ``TakesWeights``."""
        for name, tensor in self.parameters():
            if rule_for(name, self.architecture).kind is Kind.REPLICATED:
                yield name, tensor

    def without_adapters(self) -> contextlib.AbstractContextManager[None] | None:
        return None if self.adapters is None else self.adapters.switch.off()

    def sync_parameters(self) -> None:
        """Finish the last step and all pending parameter gathers, and disable the hooks that would start new
        ones."""
        self._finish_step()
        for chunk in self.chunks if self._gathers_ahead else ():
            if chunk.remove_forward_pre_hook_handles:
                # A hook would gather parameters in the middle of an export, in another order on each rank.
                chunk.disable_forward_pre_hook(param_sync=True)

    def _resume_gathering_ahead(self) -> None:
        for chunk in self.chunks if self._gathers_ahead else ():
            if not chunk.remove_forward_pre_hook_handles:
                chunk.enable_forward_pre_hook()

    def load_hf(self, source: HuggingFaceSource) -> None:
        hf_state.load_from_hf(self.stages, source, self.architecture, self.groups, self.experts)
        self.parameters_changed()

    def parameters_changed(self) -> None:
        """Update a tied output layer and the optimizer's master weights after parameters were written from
        outside."""
        self._copy_embedding_to_output_layer()
        if self.optimizer is not None:
            with cuda_redirect.cuda_literals():
                # Otherwise the next step would start from the old master weights.
                self.optimizer.reload_model_params()

    def _copy_embedding_to_output_layer(self) -> None:
        """Send the first stage's embedding to the last stage's copy of it (a tied output layer). No-op
        without pipeline stages or tied weights."""
        groups = self.groups
        if groups.pipeline_size == 1 or not self.stages[0].share_embeddings_and_output_weights:
            return
        if groups.is_first_stage:
            # Send point-to-point, because only the first and the last stage have the weight.
            dist.send(
                self.stages[0].embedding.word_embeddings.weight.detach(),
                dst=groups.last_stage_global_rank,
                group=groups.pipeline,
            )
        elif groups.is_last_stage:
            first = dist.get_global_rank(groups.pipeline, 0)
            dist.recv(self.stages[-1].output_layer.weight.detach(), src=first, group=groups.pipeline)

    def export_hf(self) -> WeightIterator:
        self.sync_parameters()
        return iter(self._weights)

    def export_stage(self) -> WeightIterator:
        self.sync_parameters()
        return self._weights.of_stage()

    def export_adapters(self) -> AdapterExport | None:
        if self.adapters is None:
            return None
        self.sync_parameters()
        return self.adapters.as_peft(), self.adapters.gathered()

    def agree_on_slices(self, wanted: Sequence[Slices], beside: int) -> Mapping[str, Slice]:
        return self._weights.agree_on_slices(wanted, beside)

    def export_slices(self) -> WeightIterator:
        self.sync_parameters()
        return self._weights.sliced()

    @property
    def gathered_bytes(self) -> int:
        """Bytes of the export buckets that exist at the same time."""
        return BUCKETS * self._bucket_bytes

    def names_by_stage(self) -> Sequence[Sequence[str]]:
        return self._weights.names_by_stage() if self.groups.pipeline_size > 1 else ()

    def move(self, part: Part, place: Place) -> None:
        if part == "parameters":
            self._finish_step()
        self._mover.move(part, place)

    def frozen(self) -> dict[str, Sequence[torch.Tensor]]:
        return self._mover.loose.frozen()

    def keep_host_copy(self, tensor: torch.Tensor, memory: torch.Tensor) -> None:
        self._mover.loose.keep_host_copy(tensor, memory)

    def save(self, weights: Path, optimizer: Path | None, write_model_files: WriteModelFiles) -> None:
        # Check first, so that a missing optimizer is reported before the weights are written.
        trained = require_optimizer(self.optimizer) if optimizer is not None else None
        self.sync_parameters()
        dtype = dtype_of(self.policy["precision"], "policy.precision")

        def add(directory: Path) -> None:
            write_model_files(directory / HF_DIRECTORY, dtype)
            self._say_adapters(directory)

        checkpoint.save_weights(self.chunks, weights, self._staging.of(weights), add)
        if optimizer is not None and trained is not None:
            checkpoint.save_optimizer(
                self.chunks, trained, self.scheduler, self.runtime, optimizer, self._staging.of(optimizer)
            )

    def _say_adapters(self, directory: Path) -> None:
        if self.adapters is not None:
            self.base.write(directory, self.adapters.as_peft())
            self.adapters.write_run_config(directory)

    def require_loadable(self, weights: Path, optimizer: Path | None) -> None:
        checkpoint.require(weights)
        if self.adapters is None:
            refuse_adapters(weights)
        else:
            self.base.require_same(weights, self.adapters.as_peft())
        checkpoint.require_output(weights, scores=scores(self.policy))
        if optimizer is not None:
            checkpoint.require(optimizer)
            checkpoint.require_same_form(require_optimizer(self.optimizer), optimizer)

    def load(self, weights: Path, optimizer: Path | None) -> None:
        trained = require_optimizer(self.optimizer) if optimizer is not None else None
        self.sync_parameters()
        checkpoint.load_weights(self.chunks, weights)
        self.parameters_changed()
        if optimizer is not None and trained is not None:
            checkpoint.load_optimizer(self.chunks, trained, self.scheduler, self.runtime, optimizer)
            if not self.policy["megatron_cfg"]["sequence_parallel"]:
                # Each rank loads its own random-number state. In the saved layout these ranks may have been
                # replicas with different states, but without sequence parallelism tensor-parallel ranks must
                # draw the same numbers.
                share_random_state(self.runtime, self.groups.tensor)

    def close(self) -> None:
        """Destroy the parallel groups and undo the redirection of ``torch.cuda``."""
        self._staging.close()
        parallel.destroy()
        cuda_redirect.restore()
