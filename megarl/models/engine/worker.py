"""The worker that all backends share. It implements the worker methods of NeMo-RL's policy API over a
``Backend``.

A concrete worker defines how its backend is built. Most methods are in base classes: passes over a batch
(``passing``), refits (``sending``, ``receiving``), files (``saving``), sharing of base weights
(``shared_base``), placement of tensors (``worker_state``). The remaining small methods are here.
"""

from __future__ import annotations

import functools
import logging
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from megarl.config.adapters import adapter_alone
from megarl.config.backend import scores
from megarl.config.defaults import complete_policy
from megarl.config.policy import PolicyConfig
from megarl.distributed.device import DeviceRuntime, runtime, seed_everything
from megarl.distributed.named_sharding import NamedSharding
from megarl.distributed.rendezvous import compare_collectives, init_process_group, set_group_timeouts
from megarl.errors import ModelError, StateError
from megarl.models.engine.backend import Backend
from megarl.models.engine.nonfinite import SkipLimit
from megarl.models.engine.offload_state import BaseAsReference, OffloadStates, ReferenceWeights
from megarl.models.engine.passing import PassingWorker
from megarl.models.engine.receiving import ReceivingWorker
from megarl.models.engine.saving import SavingWorker
from megarl.models.engine.sending import SendingWorker
from megarl.models.engine.shared_base import SharingWorker
from megarl.throughput.peaks import measured_rate
from megarl.weight_sync.broadcast import WeightBroadcaster
from megarl.weight_sync.manifest import Stages
from megarl.weight_sync.session import WeightSender


class StepTrace:
    """A recording with torch's profiler, which starts at once. Only one at a time may exist in a process.

    Args:
        device: the rank's device. On a CUDA device, its kernels are recorded too.
    """

    def __init__(self, device: torch.device) -> None:
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
        self._profile = profile(activities=activities)
        self._profile.start()

    def stop(self, path: Path) -> str:
        """Stop the recording, write it to ``path`` and return the path. The file is in Chrome's trace format,
        for ``chrome://tracing`` and ui.perfetto.dev.

        Raises:
            StateError: the file cannot be written.
        """
        self._profile.stop()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._profile.export_chrome_trace(str(path))
        except (OSError, RuntimeError) as error:
            raise StateError(
                f"profile {path} cannot be written: {error}. Fix: check free space and permissions there"
            ) from error
        return str(path)


logger = logging.getLogger(__name__)
# Standard deviation of the noise in ``_add_noise_to_weights``.
NOISE = 0.01


def begin(seed: int, *, deterministic: bool = False, check_collectives: bool = False) -> DeviceRuntime:
    """Activate this process's device, join the default process group, and seed all random generators. Return
    the device's runtime.

    Args:
        seed: seed of Python, numpy and torch.
        deterministic: see ``DeviceRuntime.set_arithmetic``.
        check_collectives: see ``compare_collectives``.
    """
    here = runtime()
    here.activate()
    # Before the process group exists, because NCCL reads its environment variables when it connects.
    here.set_arithmetic(deterministic=deterministic)
    if check_collectives:
        compare_collectives()
    # A caller, such as a test, may already have joined the process group.
    if not dist.is_initialized():
        init_process_group(here.backend, device=here.device)
    seed_everything(seed)
    return here


class EngineWorker(PassingWorker, SendingWorker, SavingWorker, ReceivingWorker, SharingWorker, ABC):
    """One rank of a policy. A subclass builds its backend.

    Most methods are in base classes: training and log-probabilities in ``passing.py``, the two halves of a
    refit in ``sending.py`` and ``receiving.py``, checkpoints and exports in ``saving.py``, sharing of base
    weights in ``shared_base.py``.

    Args:
        config: the validated policy configuration; defaults are filled in here.
        tokenizer: the model's tokenizer. It is written to exports, and decodes responses to find stop
            strings.
        weights_path: checkpoint to load after ``model_name``'s weights.
        optimizer_path: optimizer checkpoint to load with ``weights_path``.
        init_optimizer: False for a model that is not trained.
        init_reference_model: keep the weights of ``model_name`` as the reference policy, in host memory.
        worker_sharding_annotations: ignored; part of NeMo-RL's policy API. The backend creates its own
            process groups.
        pre_init_communication_queue: ignored; part of NeMo-RL's policy API. Every rank reads its own shard of
            the weights.
        seed: seed of the random generators.
        collective_timeout_s: timeout of every collective of this process, in seconds; None keeps the default
            of each process group.
        check_collectives: compare every collective across its ranks before it starts; slow.

    Raises:
        ConversionError, ModelError: the model cannot be converted, or its config and weights do not match.
        ConfigError: the precision, optimizer, schedule or parallel layout is not possible.
        CheckpointError: a checkpoint is missing or belongs to another model.
    """

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
            # After the backend is built: Megatron-Core and device meshes create its groups with their own
            # timeouts.
            set_group_timeouts(collective_timeout_s)
        self.cfg = config
        self.tokenizer = tokenizer
        self.backend = backend
        self.scores = scores(config)
        if self.scores and tokenizer is not None:
            # transformers uses this id to find a sequence's last token, which is the one that gets the score.
            backend.hf_config.pad_token_id = tokenizer.pad_token_id
        # A model that is not trained is never saved.
        if init_optimizer:
            self._keep_model_files()
        self.runtime = runtime
        self.offload_states = OffloadStates(backend.move, init_optimizer)
        self.reference: ReferenceWeights | BaseAsReference | None = None
        if init_reference_model:
            # With adapters, the base model is the reference policy, and no copy is needed.
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
        # Sends weights through mailboxes. ``send_slices`` replaces it by another sender if engines take
        # slices.
        self._handing = self._sender
        self._broadcaster: WeightBroadcaster | None = None
        self._broadcasts = False
        self._stages: Stages | None = None
        self._trace: StepTrace | None = None
        # Check before loading a checkpoint, so that NaN in the model's files is not blamed on the checkpoint.
        self._require_finite_weights(
            f"policy.model_name = {config['model_name']!r}: the model cannot be used", ModelError
        )
        if weights_path is not None:
            self.load_checkpoint(weights_path, optimizer_path)

    @staticmethod
    @abstractmethod
    def make_backend(
        config: PolicyConfig, runtime: DeviceRuntime, seed: int, with_optimizer: bool
    ) -> Backend:
        """Build the sharded model and, with ``with_optimizer``, its optimizer. ``config`` has its defaults
        filled in."""

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}[rank={dist.get_rank()}]" if dist.is_initialized() else type(self).__name__
        )

    # The following small methods are part of NeMo-RL's policy API.

    def is_alive(self) -> bool:
        """Return True: the process can still reply."""
        return True

    def reset_peak_memory_stats(self) -> None:
        """Set the recorded peak of memory use to the current use."""
        self.runtime.reset_peak_memory()

    def measure_peak_flops(self) -> float:
        """Measure the FLOP/s of a large matmul on this worker's device, at the policy's precision."""
        return measured_rate(self.runtime.device, self.cfg["precision"])

    def report_device_id(self) -> str:
        """Return a unique id of this worker's device: ``GPU-<uuid>``, or on a CPU an id of the process."""
        return self.runtime.identity()

    def start_gpu_profiling(self) -> None:
        """Open the CUDA profiler's capture range."""
        self.runtime.profiler_start()

    def stop_gpu_profiling(self) -> None:
        """Close the CUDA profiler's capture range."""
        self.runtime.profiler_stop()

    def start_torch_profiling(self, ranks: Sequence[int]) -> None:
        """Start recording with torch's profiler, if this rank is one of ``ranks``."""
        self._trace = StepTrace(self.runtime.device) if dist.get_rank() in ranks else None

    def stop_torch_profiling(self, stem: Path) -> str | None:
        """Stop this rank's recording, write it to ``<stem>_rank<N>.json`` and return the path; None without a
        recording."""
        trace, self._trace = self._trace, None
        path = stem.with_name(f"{stem.name}_rank{dist.get_rank()}.json")
        return None if trace is None else trace.stop(path)

    @torch.no_grad()
    def _add_noise_to_weights(self) -> None:
        """Add N(0, 0.01) noise to every trainable parameter in place, for tests of refits. All copies of a
        parameter get the same noise."""
        self._require("_add_noise_to_weights")
        self.backend.sync_parameters()
        # All ranks use rank 0's seed, so that replicated weights stay equal.
        seed = torch.randint(2**62, (1,)).tolist()
        dist.broadcast_object_list(seed, src=0)
        generator = torch.Generator().manual_seed(seed[0])
        for _, parameter in self.backend.trainable():
            parameter.add_((torch.randn(parameter.shape, generator=generator) * NOISE).to(parameter))
        self.backend.parameters_changed()
        self._weights_version += 1

    def shutdown(self) -> None:
        """Close connections to engines, and destroy the process groups."""
        # The two are usually the same sender, and closing it twice is harmless.
        self._sender.close()
        self._handing.close()
        self._leave_collective()
        self._leave_policy()
        # The backend destroys process groups of its own, which must happen before the default group is
        # destroyed.
        close = getattr(self.backend, "close", None)
        if close is not None:
            close()
        if dist.is_initialized():
            dist.destroy_process_group()
