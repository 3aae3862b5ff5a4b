"""``MegatronPolicyWorker``, one rank of a policy on Megatron-Core. It is a plain class: Ray wraps it in an
actor, and torchrun uses it directly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from converters.family_file import load_family_file
from megarl.config.policy import PolicyConfig
from megarl.distributed.batched_data_dict import BatchedDataDict
from megarl.distributed.device import DeviceRuntime
from megarl.models.engine.model_weights import open_weights
from megarl.models.engine.worker import EngineWorker
from megarl.models.generation.interfaces import Sampling
from megarl.models.megatron.backend import MegatronBackend
from megarl.models.megatron.generation import generate


class MegatronPolicyWorker(EngineWorker):
    """One rank of a policy on Megatron-Core."""

    backend: MegatronBackend

    @staticmethod
    def make_backend(
        config: PolicyConfig, runtime: DeviceRuntime, seed: int, with_optimizer: bool
    ) -> MegatronBackend:
        """Build the Megatron-Core backend; see ``EngineWorker.make_backend``."""
        family_file = config["megatron_cfg"]["family_file"]
        if family_file is not None:
            load_family_file(Path(family_file))
        return MegatronBackend(
            config, open_weights(config), runtime, seed=seed, with_optimizer=with_optimizer
        )

    def generate(
        self, *, data: BatchedDataDict[Any], greedy: bool = False, sampling: Sampling | None = None
    ) -> BatchedDataDict[Any]:
        """Generate a response to each prompt with the Megatron-Core model itself; see
        ``megarl.models.megatron.generation.generate``."""
        self._require("generate", remedy="prepare_for_generation")
        return generate(self.backend, data, self._generation(sampling), self.tokenizer, greedy=greedy)
