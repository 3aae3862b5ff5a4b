"""State that all parts of a worker share: the placement of parameters, gradients and optimizer state. Calls
are rejected while these are in the wrong place, or while the reference policy's weights are swapped in."""

from __future__ import annotations

import logging
from typing import Any, cast

from megarl.config.backend import generation_of
from megarl.config.generation import GenerationConfig
from megarl.config.policy import PolicyConfig
from megarl.distributed.device import DeviceRuntime
from megarl.errors import MegarlError, StateError
from megarl.models.engine.backend import Backend
from megarl.models.engine.nonfinite import require_finite
from megarl.models.engine.offload_state import OffloadState, OffloadStates
from megarl.models.generation.interfaces import Sampling
from megarl.models.generation.sampling import SamplingSettings

logger = logging.getLogger(__name__)
# Methods that a reward or value model rejects. Refits are among them, because engines only generate.
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


class WorkerState:
    """The state of a worker, and the methods that change it.

    Attributes:
        cfg: the validated policy configuration, with defaults filled in.
        tokenizer: the model's tokenizer; None if no text is processed.
        backend: the sharded model.
        runtime: the device.
        offload_states: placement of parameters, gradients and optimizer state.
        scores: the model is a reward or value model, without an output layer over tokens.
    """

    cfg: PolicyConfig
    tokenizer: Any
    backend: Backend
    runtime: DeviceRuntime
    offload_states: OffloadStates
    scores: bool
    # True while the reference policy's weights are swapped in.
    _reference_is_in: bool
    # Incremented with every change of the weights; engines report the version that they have loaded.
    _weights_version: int
    # Path of a checkpoint whose load failed, for messages; None if the weights are consistent.
    _unfinished_load: str | None

    @property
    def sampling(self) -> SamplingSettings:
        """Sampling settings of generation. Training and log-probabilities use the same settings."""
        return SamplingSettings.of(self.cfg["generation"])

    def _generation(self, sampling: Sampling | None) -> GenerationConfig:
        """Return the generation section, overridden by ``sampling``."""
        return cast(GenerationConfig, {**generation_of(self.cfg), **(sampling or {})})

    def prepare_for_training(self, *args: Any, **kwargs: Any) -> None:
        """Move parameters, gradients and optimizer state to the device, and switch to training mode."""
        moved = self.offload_states.enter(OffloadState.TRAINING, "prepare_for_training")
        self.backend.set_training(True)
        if moved:
            self.runtime.empty_cache()

    def prepare_for_lp_inference(self) -> None:
        """Move parameters to the device, and switch to evaluation mode. With
        ``policy.offload_optimizer_for_logprob``, also offload gradients and optimizer state."""
        stays = not self.cfg["offload_optimizer_for_logprob"]
        self.offload_states.enter(OffloadState.INFERENCE, "prepare_for_lp_inference", stays=stays)
        self.backend.set_training(False)

    def prepare_for_generation(self, *args: Any, **kwargs: Any) -> None:
        """Do the same as ``prepare_for_lp_inference``."""
        self.prepare_for_lp_inference()

    def offload_before_refit(self) -> None:
        """Offload gradients and optimizer state to host memory."""
        self.offload_states.enter(OffloadState.INFERENCE, "offload_before_refit")
        self.runtime.empty_cache()

    def offload_after_refit(self) -> None:
        """Offload parameters, gradients and optimizer state to host memory, and switch to evaluation mode."""
        self.offload_states.enter(OffloadState.OFFLOADED, "offload_after_refit")
        self.backend.set_training(False)
        self.runtime.empty_cache()
        figures = self.runtime.memory()
        logger.info(
            "after refit: %.0f MiB allocated, %.0f MiB reserved", figures.allocated_mb, figures.reserved_mb
        )

    def _require(
        self, method: str, *, optimizer: bool = False, remedy: str = "prepare_for_lp_inference"
    ) -> None:
        if self.scores and method in _OF_LANGUAGE_MODELS:
            raise StateError(
                f"{method}(): policy.reward_model_cfg.enabled = True, and a reward or value model "
                "has no output layer over tokens. Fix: set it to false, or call get_values()"
            )
        if not self.scores and method == "get_values":
            raise StateError(
                "get_values(): this is a language model. Fix: set policy.reward_model_cfg.enabled "
                "for a reward or value model"
            )
        self._refuse_unfinished_load(method)
        if optimizer:
            self._refuse_reference(method)
            self.offload_states.require("optimizer", method, "prepare_for_training")
        self.offload_states.require("parameters", method, remedy)

    def _refuse_reference(self, method: str) -> None:
        """Raise StateError if the reference policy's weights are swapped in, because ``method`` would mistake
        them for the policy's."""
        if self._reference_is_in:
            raise StateError(
                f"{method}() inside use_reference_model() would use the reference policy instead "
                "of the policy; leave the context first"
            )

    def _refuse_unfinished_load(self, method: str) -> None:
        """Raise StateError if the last load failed, because the weights may be a mixture of two
        checkpoints."""
        if self._unfinished_load is not None:
            raise StateError(
                f"{method}(): loading the checkpoint {self._unfinished_load} failed, so that the weights "
                "may be a mixture of its and the earlier ones. Fix: call load_checkpoint() with a complete "
                "checkpoint, or build a new policy"
            )

    def _require_finite_weights(self, consequence: str, kind: type[MegarlError]) -> None:
        self.backend.sync_parameters()
        require_finite(self.backend.parameters(), self.runtime.device, consequence, kind)

    def get_gpu_info(self) -> dict[str, Any]:
        """Return rank, device and memory statistics (MiB), and one parameter as a sample."""
        return self.runtime.facts(self.backend.parameters())
