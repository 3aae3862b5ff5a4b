"""The worker that all backends share: the NeMo-RL policy API's methods, written once over the engine's
``Backend``.

A concrete worker builds its backend and hands it to ``EngineWorker``; everything a caller of the NeMo-RL
policy API sees is here.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from converters.checkpoint.writer import write_hf
from megarl.algorithms.interfaces import check_loss
from megarl.config.adapters import adapter_alone
from megarl.config.backend import generation_of, scores
from megarl.config.defaults import complete_policy
from megarl.config.generation import GenerationConfig
from megarl.config.policy import PolicyConfig
from megarl.data.stop_tokens import generation_config_of
from megarl.distributed.batch_checks import check_sequence_dimension
from megarl.distributed.batched_data_dict import BatchedDataDict
from megarl.distributed.device import DeviceRuntime, runtime, seed_everything
from megarl.distributed.named_sharding import NamedSharding
from megarl.distributed.rendezvous import compare_collectives, init_process_group, set_group_timeouts
from megarl.errors import (
    BatchError,
    CheckpointError,
    MegarlError,
    ModelError,
    NonFiniteError,
    RefitError,
    StateError,
)
from megarl.models.engine.adapters import ADAPTER_DIRECTORY, write_peft
from megarl.models.engine.backend import Backend
from megarl.models.engine.batching import Batching, FixedRows, Planned
from megarl.models.engine.groups import on_first_rank
from megarl.models.engine.microbatches import batch_size, chosen_size, move_to, under_mask
from megarl.models.engine.nonfinite import SkipLimit, on_all_ranks, require_finite
from megarl.models.engine.offload_state import BaseAsReference, OffloadState, OffloadStates, ReferenceWeights
from megarl.models.engine.receiving import ReceivingWorker
from megarl.models.engine.step import logprobs_of_batch, topk_of_batch, train_on_batch, values_of_batch
from megarl.models.generation.interfaces import Sampling
from megarl.models.generation.sampling import SamplingSettings
from megarl.throughput.peaks import measured_rate
from megarl.weight_sync.broadcast import WeightBroadcaster
from megarl.weight_sync.ipc import host_identity
from megarl.weight_sync.manifest import ONE_STAGE, Stages, WeightIterator, drain, failing
from megarl.weight_sync.rendezvous import Rendezvous
from megarl.weight_sync.session import SlicesHere, WeightSender
from megarl.weight_sync.slices import WantedSlices, names_digest
from megarl.weight_sync.transfer_group import TransferGroup


class StepTrace:
    """A recording that begins at once. There is one in a process at a time.

    Args:
        device: of the rank; on a CUDA device its kernels are recorded too.
    """

    def __init__(self, device: torch.device) -> None:
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
        self._profile = profile(activities=activities)
        self._profile.start()

    def stop(self, path: Path) -> str:
        """End it and write it, in the trace format of Chrome, which ``chrome://tracing`` and ui.perfetto.dev
        open; the path.

        Raises:
            StateError: the file cannot be written.
        """
        self._profile.stop()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._profile.export_chrome_trace(str(path))
        except (OSError, RuntimeError) as error:
            raise StateError(
                f"profile {path} cannot be written: {error}. Fix: see to free space and permissions there"
            ) from error
        return str(path)


logger = logging.getLogger(__name__)
NOISE = 0.01
# Methods that a model which scores has no answer to; engines that weights are sent to generate.
_OF_LANGUAGE_MODELS = frozenset(
    {
        "get_logprobs",
        "get_topk_logits",
        "generate",
        "prepare_refit_info",
        "prepare_weights_for_ipc",
        "init_collective",
    }
)


def begin(seed: int, *, deterministic: bool = False, check_collectives: bool = False) -> DeviceRuntime:
    """The device of this process, active, with the default process group joined and all random-number
    generators seeded.

    Args:
        seed: of Python, numpy and torch.
        deterministic: see ``DeviceRuntime.set_arithmetic``.
        check_collectives: see ``compare_collectives``.
    """
    here = runtime()
    here.activate()
    # Before the process group: NCCL reads its variables when it connects.
    here.set_arithmetic(deterministic=deterministic)
    if check_collectives:
        compare_collectives()
    if not dist.is_initialized():
        init_process_group(here.backend, device=here.device)
    seed_everything(seed)
    return here


class EngineWorker(ReceivingWorker, ABC):
    """One rank of a policy: the worker methods of the NeMo-RL policy API over any backend, which a subclass
    makes.

    Args:
        config: the checked policy configuration; absent optional keys are filled in.
        tokenizer: of the model; goes into exported checkpoints and finds stop strings.
        weights_path: checkpoint to start from instead of ``model_name``'s weights.
        optimizer_path: optimizer checkpoint to continue from.
        init_optimizer: False for a model that is only read.
        init_reference_model: keep the weights of ``model_name`` as the reference policy, in host memory.
        worker_sharding_annotations: the layout; accepted for the NeMo-RL policy API, the groups are the
            backend's own.
        pre_init_communication_queue: accepted for it and not needed: every rank reads its own part of the
            weights.
        seed: for random-number generators.
        collective_timeout_s: bound of every collective of this process, seconds; None leaves each group its
            own.
        check_collectives: compare every collective over its ranks before it begins; slow.

    Raises:
        ConversionError, ModelError: the model cannot be carried over, or its config and weights do not fit
            together.
        ConfigError: the precision, the optimizer, the schedule or the parallel plan is not possible.
        CheckpointError: a checkpoint is missing or belongs to another model.
    """

    backend: Backend

    def __init__(
        self,
        config: PolicyConfig,
        tokenizer: Any,
        weights_path: str | None = None,
        optimizer_path: str | None = None,
        init_optimizer: bool = True,
        init_reference_model: bool = True,
        *,
        worker_sharding_annotations: NamedSharding | None = None,
        pre_init_communication_queue: Any = None,
        seed: int = 0,
        collective_timeout_s: float | None = None,
        check_collectives: bool = False,
        **unused: Any,
    ) -> None:
        config = complete_policy(config)
        runtime = begin(seed, deterministic=config["deterministic"], check_collectives=check_collectives)
        backend = self.make_backend(config, runtime, seed, init_optimizer)
        if collective_timeout_s is not None:
            # After the backend, whose groups Megatron-Core and device meshes make with bounds of their own.
            set_group_timeouts(collective_timeout_s)
        self.cfg = config
        self.tokenizer = tokenizer
        self.backend = backend
        self.scores = scores(config)
        if self.scores and tokenizer is not None:
            # where an exported model that scores looks for the last token that is no padding
            backend.hf_config.pad_token_id = tokenizer.pad_token_id
        self.runtime = runtime
        self.offload_states = OffloadStates(backend.move, init_optimizer)
        self.reference: ReferenceWeights | BaseAsReference | None = None
        if init_reference_model:
            # With adapters the base is the reference, and no copy of it is kept.
            self.reference = (
                ReferenceWeights(backend, runtime)
                if backend.without_adapters() is None
                else BaseAsReference()
            )
        self._reference_is_in = False
        self._skips = SkipLimit.of(config)
        self._weights_version = 0
        self._unfinished_load: str | None = None
        self._with_checksum = config["refit_checksum"]
        self._new_sender = functools.partial(
            WeightSender,
            runtime=runtime,
            buffer_gib=config["refit_buffer_size_gb"],
            gathered_bytes=backend.gathered_bytes,
            with_checksum=self._with_checksum,
        )
        self._sends_adapter = adapter_alone(config) is not None
        self._sender = self._new_sender(self._factors if self._sends_adapter else backend.export_hf)
        # of weights that go by themselves; another one where engines take slices
        self._handing = self._sender
        self._broadcaster: WeightBroadcaster | None = None
        self._broadcasts = False
        self._stages: Stages | None = None
        self._trace: StepTrace | None = None
        # Before a checkpoint is read: a model with NaN in it should be blamed, and not the checkpoint.
        self._require_finite_weights(
            f"policy.model_name = {config['model_name']!r}: the model is of no use", ModelError
        )
        if weights_path is not None:
            self.load_checkpoint(weights_path, optimizer_path)

    @staticmethod
    @abstractmethod
    def make_backend(
        config: PolicyConfig, runtime: DeviceRuntime, seed: int, with_optimizer: bool
    ) -> Backend:
        """The divided model with its optimizer, on a filled-in configuration."""

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}[rank={dist.get_rank()}]" if dist.is_initialized() else type(self).__name__
        )

    @property
    def sampling(self) -> SamplingSettings:
        """Return how tokens are drawn: the same in training, log-probabilities and generation."""
        return SamplingSettings.of(self.cfg["generation"])

    def _generation(self, sampling: Sampling | None) -> GenerationConfig:
        """Return the generation section, with tokens drawn as ``sampling`` says."""
        return cast(GenerationConfig, {**generation_of(self.cfg), **(sampling or {})})

    # training and log-probabilities

    def train(
        self,
        data: BatchedDataDict[Any],
        loss_fn: Any,
        eval_mode: bool = False,
        gbs: int | None = None,
        mbs: int | None = None,
    ) -> dict[str, Any]:
        """Train on (or, with ``eval_mode``, only evaluate) this data-parallel rank's share of the batch.

        Args:
            data: rows of the NeMo-RL policy API, on the CPU.
            loss_fn: a ``LossFunction``.
            eval_mode: change nothing: no gradients, no optimizer step, no schedule step.
            gbs: samples of a global batch over all data-parallel ranks; ``train_global_batch_size`` by
                default.
            mbs: rows of a micro-batch; ``train_micro_batch_size`` by default.

        Returns:
            ``global_loss`` float32 [global batches], ``grad_norm`` (0-d, of the last global batch; None in
            evaluation), ``rank``, ``all_mb_metrics`` a list for each metric, ``skipped`` global batches
            without a step (rows counted in this replica's share), ``positions`` of this replica's passes,
            padding among them, ``gpu_info`` as ``get_gpu_info`` (None in evaluation).

        Raises:
            ConfigError: ``loss_fn`` is a loss of values and the model gives log-probabilities, or the
                reverse.
            NonFiniteError: a loss or gradient is not finite, and ``policy.on_nonfinite`` does not allow to go
                on.
        """
        check_loss(loss_fn, scores=self.scores)
        self._require("train", optimizer=not eval_mode)
        global_batch = chosen_size(gbs, self.cfg["train_global_batch_size"], "global batch size")
        micro_batch = chosen_size(mbs, self.cfg["train_micro_batch_size"], "micro-batch size")
        if "sample_mask" not in data:
            raise BatchError("sample_mask must be present in the data that train() is given: [B] of 0 and 1")
        check_sequence_dimension(data)
        batching = self._plan_of(data) or FixedRows(
            micro_batch, self._local_batch_size(data, global_batch, micro_batch)
        )
        skips = getattr(loss_fn, "skips_masked", False) and "token_mask" in data
        # before, not after: a call that ends in an error may have taken steps
        self._weights_version += not eval_mode
        result = train_on_batch(
            self.backend,
            move_to(data, self.runtime.device, wanted=under_mask(data) if skips else None),
            loss_fn,
            batching,
            sampling=self.sampling,
            limit=None if eval_mode else self._skips,
            chunk_size=self.cfg["logprob_chunk_size"],
        )
        return {
            "global_loss": result.losses,
            "grad_norm": torch.tensor(result.grad_norms[-1]) if result.grad_norms else None,
            "rank": dist.get_rank(),
            "all_mb_metrics": result.micro_batch_metrics,
            "skipped": [batch.as_record() for batch in result.skipped],
            "positions": result.positions,
            "gpu_info": None if eval_mode else self.get_gpu_info(),
        }

    def _local_batch_size(self, data: Mapping[str, Any], global_batch: int, micro_batch: int) -> int:
        ranks = self.backend.groups.data_size
        if global_batch % ranks:
            raise BatchError(
                f"global batch size = {global_batch}: not a multiple of the {ranks} data-parallel ranks; "
                "choose a multiple"
            )
        local = global_batch // ranks
        if local % micro_batch:
            raise BatchError(
                f"micro-batch size = {micro_batch}: does not divide the {local} samples of a global batch "
                "on one data-parallel rank; "
                "choose a divisor"
            )
        if batch_size(data) % local or batch_size(data) == 0:
            raise BatchError(
                f"{batch_size(data)} rows on this data-parallel rank: need a positive multiple of {local} "
                "(one global batch)"
            )
        return local

    def _plan_of(self, data: BatchedDataDict[Any]) -> Planned | None:
        """The micro-batches that the driver planned by tokens; None where micro-batches have a fixed number
        of rows.

        Raises:
            BatchError: the configuration asks for a plan and the batch has none.
        """
        packed = self.cfg["sequence_packing"]["enabled"]
        if not packed and not self.cfg["dynamic_batching"]["enabled"]:
            return None
        indices, lengths, counts = data.micro_batch_indices, data.micro_batch_lengths, data.elem_counts_per_gb
        if indices is None or lengths is None:
            way = "sequence_packing" if packed else "dynamic_batching"
            raise BatchError(
                f"policy.{way} is enabled, but the batch carries no plan of its micro-batches; "
                "shard it with megarl.models.policy.batch_plan.shard_batch, or disable it"
            )
        return Planned(indices, lengths, counts or [chunk[-1][1] for chunk in indices], packed)

    def get_logprobs(
        self, data: BatchedDataDict[Any], micro_batch_size: int | None = None, *, skip_masked: bool = False
    ) -> BatchedDataDict[Any]:
        """``logprobs`` [B, S] float32 on the CPU under the present weights; column 0 and padding are 0.

        Args:
            data: ``input_ids`` [B, S] and ``input_lengths`` [B]; with ``skip_masked`` also ``token_mask`` [B,
                S], perhaps ``sample_mask`` [B].
            micro_batch_size: rows that go through the model together; ``logprob_batch_size`` by default.
            skip_masked: tokens under a mask of 0 are not scored; they are 0 too.
        """
        self._require("get_logprobs")
        batch, batching, wanted = self._scored_batch(data, micro_batch_size, skip_masked)
        chunk_size = self.cfg["logprob_chunk_size"]
        found = logprobs_of_batch(
            self.backend, batch, batching, sampling=self.sampling, chunk_size=chunk_size
        )
        logprobs = found.cpu()
        return BatchedDataDict(
            {"logprobs": logprobs if wanted is None else logprobs.where(wanted, torch.zeros_like(logprobs))}
        )

    def get_topk_logits(
        self,
        data: BatchedDataDict[Any],
        k: int,
        micro_batch_size: int | None = None,
        *,
        skip_masked: bool = False,
        vocabulary_size: int | None = None,
    ) -> BatchedDataDict[Any]:
        """The ``k`` most likely tokens behind each token under the present weights, on the CPU.

        Args:
            data: as for ``get_logprobs``.
            k: at most the vocabulary.
            micro_batch_size: rows that go through the model together; ``logprob_batch_size`` by default.
            skip_masked: nothing is computed for tokens under a mask of 0; where one would follow, there is 0.
            vocabulary_size: tokens from this on count as none; None for all.

        Returns:
            As ``megarl.models.engine.step.topk_of_batch``: ``topk_logits`` [B, S, k] float32,
                ``topk_indices`` [B, S, k] int64, and
            ``logprobs`` [B, S] of the tokens that are there.
        """
        self._require("get_topk_logits")
        batch, batching, wanted = self._scored_batch(data, micro_batch_size, skip_masked)
        found = topk_of_batch(
            self.backend,
            batch,
            batching,
            count=k,
            sampling=self.sampling,
            vocabulary_size=vocabulary_size,
            chunk_size=self.cfg["logprob_chunk_size"],
        )
        columns = {name: values.cpu() for name, values in found.items()}
        if wanted is not None:
            followed = torch.nn.functional.pad(wanted[:, 1:], (0, 1))
            places = {
                "logprobs": wanted,
                **dict.fromkeys(("topk_logits", "topk_indices"), followed[..., None]),
            }
            columns = {
                name: values.where(places[name], torch.zeros_like(values)) for name, values in columns.items()
            }
        return BatchedDataDict(columns)

    def get_values(
        self, data: BatchedDataDict[Any], micro_batch_size: int | None = None
    ) -> BatchedDataDict[Any]:
        """``values`` [B, S] float32 on the CPU under the present weights, of a model that scores: entry i is
        what it says at token i, from all tokens up to it; padding is 0.

        Args:
            data: ``input_ids`` [B, S] and ``input_lengths`` [B].
            micro_batch_size: rows that go through the model together; ``logprob_batch_size`` by default.
        """
        self._require("get_values")
        batch, batching, _ = self._scored_batch(data, micro_batch_size)
        return BatchedDataDict({"values": values_of_batch(self.backend, batch, batching).cpu()})

    def _scored_batch(
        self, data: BatchedDataDict[Any], micro_batch_size: int | None, skip_masked: bool = False
    ) -> tuple[dict[str, Any], Batching, torch.Tensor | None]:
        """Return what a pass that scores reads of ``data``, on the device; how it is cut; and the tokens that
        are wanted, bool [B, S] on the host, None for all."""
        rows = chosen_size(micro_batch_size, self.cfg["logprob_batch_size"], "micro-batch size")
        check_sequence_dimension(data)
        wanted = under_mask(data) if skip_masked else None
        batch = move_to(
            {key: data[key] for key in ("input_ids", "input_lengths")}, self.runtime.device, wanted=wanted
        )
        return batch, self._plan_of(data) or FixedRows(rows), wanted

    @contextlib.contextmanager
    def use_reference_model(self) -> Iterator[None]:
        """Inside, the model has the reference policy's weights."""
        if self.reference is None:
            raise StateError(
                "there is no reference policy: the worker was built with init_reference_model=False; build "
                "it with True"
            )
        self._require("use_reference_model")
        with self.reference.swapped_in(self.backend):
            before, self._reference_is_in = self._reference_is_in, True
            try:
                yield
            finally:
                self._reference_is_in = before

    def get_reference_policy_logprobs(
        self, data: BatchedDataDict[Any], micro_batch_size: int | None = None, *, skip_masked: bool = False
    ) -> BatchedDataDict[Any]:
        """Compute as ``get_logprobs`` under the reference policy, key ``reference_logprobs``."""
        with self.use_reference_model():
            found = self.get_logprobs(data=data, micro_batch_size=micro_batch_size, skip_masked=skip_masked)
            return BatchedDataDict({"reference_logprobs": found["logprobs"]})

    def _require(
        self, method: str, *, optimizer: bool = False, remedy: str = "prepare_for_lp_inference"
    ) -> None:
        if self.scores and method in _OF_LANGUAGE_MODELS:
            raise StateError(
                f"{method}(): policy.reward_model_cfg.enabled = True, and a model that scores has no output "
                "layer over tokens. "
                "Fix: set it to false, or call get_values()"
            )
        if not self.scores and method == "get_values":
            raise StateError(
                "get_values(): this is a language model. Fix: set policy.reward_model_cfg.enabled for a "
                "model that scores"
            )
        self._refuse_unfinished_load(method)
        if optimizer:
            self._refuse_reference(method)
            self.offload_states.require("optimizer", method, "prepare_for_training")
        self.offload_states.require("parameters", method, remedy)

    def _refuse_reference(self, method: str) -> None:
        """Refuse what would mix the reference policy's weights with the policy's own."""
        if self._reference_is_in:
            raise StateError(
                f"{method}() inside use_reference_model() would take the reference policy for the policy; "
                "leave the context first"
            )

    # where parameters, gradients and optimizer state are

    def prepare_for_training(self, *args: Any, **kwargs: Any) -> None:
        """Everything on the device, training behaviour."""
        moved = self.offload_states.enter(OffloadState.TRAINING, "prepare_for_training")
        self.backend.set_training(True)
        if moved:
            self.runtime.empty_cache()

    def prepare_for_lp_inference(self) -> None:
        """Parameters on the device, evaluation behaviour; with ``policy.offload_optimizer_for_logprob``
        gradients and optimizer state leave."""
        stays = not self.cfg["offload_optimizer_for_logprob"]
        self.offload_states.enter(OffloadState.INFERENCE, "prepare_for_lp_inference", stays=stays)
        self.backend.set_training(False)

    def prepare_for_generation(self, *args: Any, **kwargs: Any) -> None:
        """Parameters on the device, evaluation behaviour."""
        self.prepare_for_lp_inference()

    def offload_before_refit(self) -> None:
        """Gradients and optimizer state to host memory."""
        self.offload_states.enter(OffloadState.INFERENCE, "offload_before_refit")
        self.runtime.empty_cache()

    def offload_after_refit(self) -> None:
        """Parameters to host memory as well."""
        self.offload_states.enter(OffloadState.OFFLOADED, "offload_after_refit")
        self.backend.set_training(False)
        self.runtime.empty_cache()
        figures = self.runtime.memory()
        logger.info(
            "after refit: %.0f MiB allocated, %.0f MiB reserved", figures.allocated_mb, figures.reserved_mb
        )

    # refit: the present weights, to an engine that generates on the same devices

    def _factors(self) -> WeightIterator:
        """Return the factors of all adapters, by PEFT's names: what engines get that compute with adapters. A
        collective."""
        found = self.backend.export_adapters()
        assert found is not None, "policy.peft is enabled"
        return found[1]

    def prepare_refit_info(self, first_rank_only: bool = False) -> dict[str, Any]:
        """``{name: (shape, dtype)}`` of what a refit sends, in its order; the same on all ranks, or empty on
        all but the first."""
        if not self._sender.knows_manifest:
            self._refuse_reference("prepare_refit_info")
            self._require("prepare_refit_info")
        manifest = self._sender.manifest
        return {} if first_rank_only and dist.get_rank() else manifest.description()

    def prepare_info_for_collective(self) -> dict[str, Any]:
        """Older name of ``prepare_refit_info``."""
        return self.prepare_refit_info()

    def prepare_weights_for_ipc(self) -> tuple[list[tuple[str, int]], float]:
        """Begin a refit; names with their bytes in the transfer buffer, in the order of sending, and the
        bytes that a group may have."""
        budget = self.begin_refit()
        return self._sender.manifest.padded_sizes, float(budget)

    def begin_refit(self) -> int:
        """Begin a refit for a caller that knows the weights' names already: at a refit no name travels."""
        return self._begin_with(self._sender)

    def _begin_with(self, sender: WeightSender) -> int:
        self._refuse_reference("prepare_weights_for_ipc")
        self._require("prepare_weights_for_ipc")
        return sender.begin(self._weights_version)

    def get_weights_ipc_handles(self, keys: Iterable[str]) -> dict[str, Any]:
        """Lay the next group of weights into the transfer buffer. All ranks gather; those with a buffer
        return ``{device: payload}``."""
        self._refuse_reference("get_weights_ipc_handles")
        self._require("get_weights_ipc_handles")
        return self._sender.send(list(keys))

    def get_part_ipc_handles(self, first: int, count: int) -> dict[str, Any]:
        """Return the handles of a group by the index of its first weight in the order of sending, and how
        many it has."""
        self._refuse_reference("get_weights_ipc_handles")
        self._require("get_weights_ipc_handles")
        return self._sender.send_part(first, count)

    def mailbox(self) -> dict[str, Any]:
        """``{device: handle}`` of what a rank of an engine beside this one looks into for weights; empty on a
        rank that publishes none."""
        self.prepare_refit_info()
        return self._handing.mailbox()

    def send_slices(self, wanted: WantedSlices | None, first_rank_only: bool = False) -> list[str] | str:
        """From now on hand to each rank of an engine what it reads of the weights. Collective.

        Args:
            wanted: what the ranks of the engines read; None where they take whole weights.
            first_rank_only: the other ranks give a digest.

        Returns:
            The names of the weights that go as slices, the same on all ranks, or ``names_digest`` of them;
            mailboxes are others where there are any.
        """
        names = self._sent_as_slices(wanted)
        return names_digest(names) if first_rank_only and dist.get_rank() else names

    def _sent_as_slices(self, wanted: WantedSlices | None) -> list[str]:
        self.prepare_refit_info()
        if self._handing is not self._sender:
            self._handing.close()
            self._handing = self._sender
        if wanted is None or self._sends_adapter:
            return []
        beside = self._engine_rank_beside(wanted)
        slices = self.backend.agree_on_slices(wanted.ranks, beside)
        if not slices:
            return []
        manifest = self._sender.manifest.sliced(slices)
        everybody: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everybody, (host_identity(), beside))
        here = SlicesHere(manifest, beside, everybody.index((host_identity(), beside)) == dist.get_rank())
        self._sender.close()
        self._handing = self._new_sender(self.backend.export_slices, slices=here)
        return list(manifest.slices)

    def _engine_rank_beside(self, wanted: WantedSlices) -> int:
        """Return the rank of an engine that reads this rank's weights; -1 for none. On a CPU, where all of a
        host can, the one that would be on the same GPU: engines lie one after another over the policy's
        ranks."""
        if self.runtime.is_cuda:
            return wanted.devices.get(self.runtime.identity(), -1)
        return dist.get_rank() % len(wanted.ranks) if dist.get_world_size() % len(wanted.ranks) == 0 else -1

    def hand_over_weights(self, session: int, ticket: int, most: int | None = None) -> None:
        """Give the present weights to the ranks of engines beside this worker, each group when the one before
        the last was read.

        Args:
            session: number of the engines, from ``RolloutEngine.meet``.
            ticket: number of this refit, the same for policy and engines and no other refit's.
            most: bytes of a group, where it is to be less than the transfer buffers hold.

        Raises:
            StateError: the weights are not those of the policy, or in host memory.
            RefitError: a rank of the policy could not begin; a weight is larger than a group; an engine rank
                does not read.
        """
        try:
            room = self._begin_together()
        except BaseException as error:
            self._handing.refuse(session, ticket, error)
            self._handing.give_up()
            raise
        if self._handing is not self._sender:
            # the slices of ranks may differ by an index, and so the room
            # for the largest; only whole weights lie alike on all ranks
            room = max(room, self._handing.manifest.largest[1])
        self._handing.hand_over(session, ticket, most=room if most is None else min(room, most))

    def _begin_together(self) -> int:
        """Begin a refit on all ranks, or on none. A collective; returns the bytes that a group may have on
        every one of them."""
        failure: Exception | None = None
        room = -1
        try:
            room = self._begin_with(self._handing)
        except Exception as error:
            failure = error
        # one group is laid out alike on all ranks, whose devices
        # may have more or less room; none begins where one cannot
        least = torch.tensor([room], device=self.runtime.device)
        dist.all_reduce(least, op=dist.ReduceOp.MIN)
        if int(least) < 0:
            raise failure or RefitError(
                "another rank of the policy could not begin the refit: see its own error, and refit anew"
            )
        return int(least)

    # refit of an engine elsewhere

    def init_collective(self, ip: str, port: int, world_size: int) -> None:
        """Make the groups that weights are sent over, one a pipeline stage; of the policy, the first rank of
        the stage alone is in it.

        Args:
            ip, port: where rank 0 listens, on this address alone. A name has to mean the same there as
                elsewhere; on Debian a host's own name is 127.0.1.1 to itself.
            world_size: ranks of the engines, and one.

        Raises:
            RefitError: an engine rank is missing or expects something else.
        """
        self._refuse_reference("init_collective")
        self._require("init_collective")
        manifest, stages, groups = self._sender.manifest, self._who_sends(), self.backend.groups
        self._leave_collective()
        # first of all the port: who looked for rank 0 at one that
        # is another's could come into another run's rendezvous
        with on_first_rank(RefitError) as first:
            rendezvous = Rendezvous(ip, port, keeps=True) if first else None
        with on_first_rank(RefitError):
            # factors of all stages go out from the first one
            if groups.is_first_in_stage and (groups.is_first_stage or not self._sends_adapter):
                group = TransferGroup(
                    ip,
                    port,
                    world_size,
                    0,
                    digest=manifest.digest,
                    device=self.runtime.device,
                    buffer_bytes=self._sender.slot_bytes(),
                    stage=groups.pipeline_rank,
                    stages=stages,
                    rendezvous=rendezvous,
                )
                self._broadcaster = WeightBroadcaster(group, manifest, with_checksum=self._with_checksum)
        self._broadcasts = True

    def _who_sends(self) -> Stages:
        """Worked out once, from the names that the stages export; local."""
        if self._stages is None:
            manifest, names = (
                self._sender.manifest,
                () if self._sends_adapter else self.backend.names_by_stage(),
            )
            self._stages = Stages.of(manifest, names) if names else ONE_STAGE
        return self._stages

    def _leave_collective(self) -> None:
        broadcaster, self._broadcaster, self._broadcasts = self._broadcaster, None, False
        if broadcaster is not None:
            broadcaster.close()

    def broadcast_weights_for_collective(self) -> None:
        """Send the present weights over the groups of ``init_collective``, each stage its own, until every
        engine rank has them all.

        Raises:
            StateError: there is no group, or the weights are not those of the policy or in host memory; the
                engines hear of that.
            RefitError: an engine or a stage is gone; the groups are of no more use.
        """
        if not self._broadcasts:
            raise StateError(
                "broadcast_weights_for_collective(): no engine is connected; call init_collective() first"
            )
        with on_first_rank(RefitError):
            stream = self._weights_of_stage()
            if self._broadcaster is not None:
                self._broadcaster.send(stream, self._weights_version)
            drain(stream)

    def _weights_of_stage(self) -> WeightIterator:
        """Return the weights of this stage; an error that keeps them back comes with the stream, so that
        waiting engines hear of it too."""
        try:
            self._refuse_reference("broadcast_weights_for_collective")
            self._require("broadcast_weights_for_collective")
            return self._factors() if self._sends_adapter else self.backend.export_stage()
        except Exception as error:
            return failing(error)

    # checkpoints

    def save_checkpoint(
        self, weights_path: str, optimizer_path: str | None = None, tokenizer_path: str | None = None
    ) -> None:
        """Write weights, and optimizer state with schedule and random-number states when ``optimizer_path``
        is given.

        Each path is a directory that appears whole or not at all. Only rank 0 writes the tokenizer.

        Raises:
            CheckpointError: a directory exists already, or cannot be written.
            NonFiniteError: a weight is NaN or infinite.
            StateError: inside ``use_reference_model()``, the parameters are in host memory, a load has
                failed, or there is no tokenizer to write.
        """
        self._refuse_reference("save_checkpoint")
        self._require("save_checkpoint", remedy="prepare_for_training")
        if tokenizer_path and self.tokenizer is None:
            raise StateError(
                f"tokenizer_path = {tokenizer_path!r}: this worker was built without a tokenizer; leave the "
                "path out"
            )
        self._require_finite_weights(
            f"save_checkpoint({weights_path!r}): nothing was written", NonFiniteError
        )
        self.backend.save(Path(weights_path), Path(optimizer_path) if optimizer_path else None)
        with on_first_rank() as first:
            if first and tokenizer_path:
                try:
                    self.tokenizer.save_pretrained(tokenizer_path)
                except OSError as error:
                    raise CheckpointError(
                        f"the tokenizer cannot be written to {tokenizer_path}: {error}"
                    ) from error

    def load_checkpoint(self, weights_path: str, optimizer_path: str | None = None) -> None:
        """Read what ``save_checkpoint`` wrote, also on a live worker and from any other layout.

        Where there is no checkpoint, nothing changes. After any other error the weights may be a mixture, and
        until a load succeeds, all that would use them is refused.

        Raises:
            CheckpointError: a directory is missing, on the host of any rank, or holds another model or
                weights that are not finite.
            StateError: inside ``use_reference_model()``, or the parameters are in host memory.
        """
        self._refuse_reference("load_checkpoint")
        self.offload_states.require("parameters", "load_checkpoint", "prepare_for_training")
        weights, optimizer = Path(weights_path), Path(optimizer_path) if optimizer_path else None
        self._require_loadable(weights, optimizer)
        # before, not after: a load that ends in an error may have changed weights
        self._weights_version += 1
        self._unfinished_load = " with ".join(str(path) for path in (weights, optimizer) if path is not None)
        self.backend.load(weights, optimizer)
        self._require_finite_weights(
            f"load_checkpoint({str(weights_path)!r}): the checkpoint is of no use", CheckpointError
        )
        self._unfinished_load = None  # every rank has come to that collective, so that no load has failed

    def _require_loadable(self, weights: Path, optimizer: Path | None) -> None:
        """Refuse a load on all ranks where one of them cannot begin it."""
        failure: Exception | None = None
        try:
            self.backend.require_loadable(weights, optimizer)
        except Exception as error:
            failure = error
        if not on_all_ranks(failure is None, self.runtime.device):
            elsewhere = (
                f"load_checkpoint({str(weights)!r}): another rank cannot begin, its own error says "
                "why; nothing was changed. "
            )
            raise failure or CheckpointError(f"{elsewhere}Fix: a path that all hosts see")

    def _refuse_unfinished_load(self, method: str) -> None:
        """Refuse what would take a mixture of two checkpoints for the policy."""
        if self._unfinished_load is not None:
            raise StateError(
                f"{method}(): loading the checkpoint {self._unfinished_load} failed, so that the weights "
                "may be its in part and those from "
                "before in part. Fix: load_checkpoint() of one that is whole, or make the policy anew"
            )

    def export_hf(self, path: str) -> None:
        """Write the present weights as a Hugging Face checkpoint (safetensors, config, tokenizer) that
        appears whole or not at all.

        Adapters are merged into them, and stand by themselves in its directory ``adapter``, in PEFT's form. A
        vision tower and a layer that predicts further tokens are written as the model's own directory has
        them.

        Raises:
            ConversionError: on rank 0, ``path`` exists already.
            CheckpointError: on the other ranks, when rank 0 could not write.
            NonFiniteError: a weight is NaN or infinite.
        """
        self._require("export_hf")
        self._require_finite_weights(f"export_hf({path!r}): nothing was written", NonFiniteError)
        beside, untouched = self._writer_beside(), self.backend.untouched
        stream = self.backend.export_hf()
        with on_first_rank() as first:
            try:
                if first:
                    weights = itertools.chain(
                        ((name, tensor.cpu()) for name, tensor in stream), untouched.tensors()
                    )
                    # a model that scores generates nothing
                    generates = self.tokenizer is not None and not self.scores
                    settings = (
                        generation_config_of(self.tokenizer, self.cfg["model_name"]) if generates else None
                    )
                    write_hf(weights, Path(path), self.hf_config, self.tokenizer, settings, beside=beside)
            finally:
                drain(stream)

    def _writer_beside(self) -> Callable[[Path], None]:
        """Return what writes into the directory of an export after weights, config and tokenizer: adapters,
        which it gathers on the first rank, and files that belong to a part of the model which is not
        trained."""
        found = self.backend.export_adapters()
        config, factors = ({}, ()) if found is None else found
        gathered = {name: tensor.cpu() for name, tensor in factors if dist.get_rank() == 0}

        def write(directory: Path) -> None:
            self.backend.untouched.copy_files(directory)
            if found is not None:
                write_peft(directory / ADAPTER_DIRECTORY, config, gathered)

        return write

    def _require_finite_weights(self, consequence: str, kind: type[MegarlError]) -> None:
        self.backend.sync_parameters()
        require_finite(self.backend.parameters(), self.runtime.device, consequence, kind)

    @property
    def hf_config(self) -> Any:
        """The Hugging Face config that goes into an export."""
        return self.backend.hf_config

    # small methods of the NeMo-RL policy API

    def is_alive(self) -> bool:
        """True, from any worker that still answers."""
        return True

    def reset_peak_memory_stats(self) -> None:
        """Start peak memory figures anew."""
        self.runtime.reset_peak_memory()

    def get_gpu_info(self) -> dict[str, Any]:
        """Rank, device, memory figures (MiB), and one parameter as a sample."""
        return self.runtime.facts(self.backend.parameters())

    def measure_peak_flops(self) -> float:
        """FLOP/s of a large matrix product on this worker's device, at the policy's precision."""
        return measured_rate(self.runtime.device, self.cfg["precision"])

    def report_device_id(self) -> str:
        """Return what tells this worker's device from every other one (``GPU-<uuid>``; on a CPU the worker's
        process)."""
        return self.runtime.identity()

    def start_gpu_profiling(self) -> None:
        """Open the CUDA profiler's capture range."""
        self.runtime.profiler_start()

    def stop_gpu_profiling(self) -> None:
        """Close the CUDA profiler's capture range."""
        self.runtime.profiler_stop()

    def start_torch_profiling(self, ranks: Sequence[int]) -> None:
        """Record with torch's profiler, on these ranks alone."""
        self._trace = StepTrace(self.runtime.device) if dist.get_rank() in ranks else None

    def stop_torch_profiling(self, stem: Path) -> str | None:
        """End the recording, if this rank has one, and write it to ``<stem>_rank<N>.json``; where it is."""
        trace, self._trace = self._trace, None
        path = stem.with_name(f"{stem.name}_rank{dist.get_rank()}.json")
        return None if trace is None else trace.stop(path)

    @torch.no_grad()
    def _add_noise_to_weights(self) -> None:
        """Add N(0, 0.01) to every trainable parameter, in place (for tests of refit). All copies of a weight
        get the same noise."""
        self._require("_add_noise_to_weights")
        self.backend.sync_parameters()
        seed = torch.randint(2**62, (1,)).tolist()
        dist.broadcast_object_list(seed, src=0)
        generator = torch.Generator().manual_seed(seed[0])
        for _, parameter in self.backend.trainable():
            parameter.add_((torch.randn(parameter.shape, generator=generator) * NOISE).to(parameter))
        self.backend.parameters_changed()
        self._weights_version += 1

    def shutdown(self) -> None:
        """Leave the process groups."""
        self._sender.close()
        self._handing.close()
        self._leave_collective()
        self._leave_policy()
        close = getattr(self.backend, "close", None)
        if close is not None:
            close()
        if dist.is_initialized():
            dist.destroy_process_group()
