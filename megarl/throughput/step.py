"""Throughput metrics of a step by phase: tokens per second, TFLOP/s, MFU and idle time."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from converters.model_config.architecture import ModelFacts
from megarl.config.adapters import adapter_parameters, adapters_of, vocabulary_adapter_parameters
from megarl.config.backend import enabled_backend
from megarl.config.policy import PolicyConfig
from megarl.observe.timing import (
    GENERATION,
    ROLLOUT_WAIT,
    STEP_SECONDS,
    TRAIN,
    TRAIN_CRITIC,
    Sequences,
    beside_training,
)
from megarl.throughput.flops import ModelFlops

WAITING = frozenset({"reward", ROLLOUT_WAIT})
"""Phases in which the devices are idle."""


@dataclass(frozen=True, slots=True)
class Devices:
    """Number of devices of a run, and their peak.

    Attributes:
        training: devices of the policy.
        generating: devices that generate; equal to ``training`` unless engines have their own devices.
        together: all devices.
        peak: peak FLOP/s of a device.
    """

    training: int
    generating: int
    together: int
    peak: float


@dataclass(frozen=True, slots=True)
class StepThroughput:
    """Computes the throughput metrics of a step.

    Attributes:
        devices: devices of the run.
        flops: FLOPs of the model; None if its dimensions are unknown, which leaves only token rates.
        recomputes: activations are recomputed in the backward pass.
        frozen_routers: routers are frozen.
        recomputed: recomputed modules; None for whole layers.
        adapters: number of adapter parameters that a token uses, if only adapters are trained; else None.
    """

    devices: Devices
    flops: ModelFlops | None
    recomputes: bool = False
    frozen_routers: bool = False
    recomputed: Collection[str] | None = None
    adapters: int | None = None

    @classmethod
    def of(cls, policy: PolicyConfig, facts: ModelFacts | None, devices: Devices) -> StepThroughput:
        """Build the calculator from a ``policy`` section with its defaults."""
        backend = enabled_backend(policy)
        flops = None if facts is None else ModelFlops.of(facts)
        peft = adapters_of(policy)
        adapters = None
        if peft is not None and facts is not None:
            # A token uses the adapters of its own experts only.
            taken = 0 if facts.mixture is None else facts.mixture.experts_per_token
            _, output = vocabulary_adapter_parameters(peft, facts)
            adapters = adapter_parameters(peft, facts, range(facts.num_layers), experts=(taken, 1)) + output
        if backend == "megatron":
            megatron = policy["megatron_cfg"]
            parts = (
                megatron["recompute_modules"] if megatron["recompute_granularity"] == "selective" else None
            )
            return cls(
                devices,
                flops,
                megatron["activation_checkpointing"],
                megatron["freeze_moe_router"],
                parts,
                adapters,
            )
        if backend == "dtensor":
            return cls(devices, flops, policy["dtensor_cfg"]["activation_checkpointing"], adapters=adapters)
        return cls(devices, flops, policy["activation_checkpointing_enabled"])

    def metrics(
        self, tokens: int, seconds: Mapping[str, float], sequences: Mapping[str, Sequence[Sequences]]
    ) -> dict[str, float]:
        """Return the throughput metrics of a step.

        Args:
            tokens: tokens of the step's samples, without padding.
            seconds: result of ``PhaseTimer.collect``.
            sequences: result of ``PhaseTimer.take_sequences``; nested phases, such as those of a validation,
                are ignored.

        Returns:
            For each phase with sequences, such as ``train``: ``train_tokens_per_s`` (sampled tokens for
                generation, else all tokens without padding), ``train_tokens_per_s_per_device`` and, if the
                model's dimensions are known, ``train_tflops`` (per device) and ``train_mfu`` (fraction of
                ``peak_tflops``). With recomputation also ``train_hfu``, which includes it. The same names
                without a phase are for the whole step and all devices. ``padding_efficiency`` is tokens per
                computed position in training. ``idle_s`` is the time outside of phases or in phases of
                ``WAITING``.
        """
        figures: dict[str, float] = {"peak_tflops": self.devices.peak / 1e12}
        model = hardware = 0.0
        for phase, passed in sequences.items():
            took = seconds.get(f"{phase}_s", 0.0)
            # A nested phase's time is included in its outer phase.
            if took <= 0 or "/" in phase:
                continue
            work, extra = self._flops(phase, passed)
            model, hardware = model + work, hardware + work + extra
            # Generation engines may have devices of their own.
            count = self.devices.generating if phase == GENERATION else self.devices.training
            figures |= self._rates(f"{phase}_", _tokens(phase, passed), work, extra, took, count)
        step = seconds[STEP_SECONDS]
        if step > 0:
            figures |= self._rates("", tokens, model, hardware - model, step, self.devices.together)
        figures |= _padding(sequences.get(TRAIN, ()))
        figures["idle_s"] = max(0.0, step - math.fsum(_working(seconds)))
        return figures

    def _flops(self, phase: str, passed: Sequence[Sequences]) -> tuple[float, float]:
        """Return the model's FLOPs in a phase, and the FLOPs of recomputation."""
        if self.flops is None:
            return 0.0, 0.0
        # The policy's adapters do not belong to the critic.
        routers, adapters = self.frozen_routers, self.adapters if phase == TRAIN else None
        model, again = list[float](), list[float]()
        for each in passed:
            if phase == GENERATION:
                model.append(self.flops.generation(each.prompts, each.prompt_lengths, each.lengths))
            elif phase not in (TRAIN, TRAIN_CRITIC):
                model.append(self.flops.forward(each.lengths, each.scored))
            else:
                model.append(
                    self.flops.training(each.lengths, each.scored, frozen_routers=routers, adapters=adapters)
                )
                if self.recomputes:
                    again.append(self.flops.recomputation(each.lengths, self.recomputed))
        return math.fsum(model), math.fsum(again)

    def _rates(
        self, prefix: str, tokens: int, work: float, extra: float, seconds: float, devices: int
    ) -> dict[str, float]:
        rates = {
            f"{prefix}tokens_per_s": tokens / seconds,
            f"{prefix}tokens_per_s_per_device": tokens / seconds / devices,
        }
        if self.flops is not None:
            rate = work / seconds / devices
            rates |= {f"{prefix}tflops": rate / 1e12, f"{prefix}mfu": rate / self.devices.peak}
            # Without recomputation this equals the MFU.
            if extra:
                rates[f"{prefix}hfu"] = (work + extra) / seconds / devices / self.devices.peak
        return rates


def _tokens(phase: str, passed: Sequence[Sequences]) -> int:
    """Return the number of sampled tokens for generation, else of all tokens."""
    tokens = 0
    for each in passed:
        tokens += int(np.sum(each.lengths))
        if phase == GENERATION:
            tokens -= int(np.sum(each.prompt_lengths))
    return tokens


def _padding(passed: Sequence[Sequences]) -> dict[str, float]:
    """Return ``padding_efficiency``, tokens per computed position; empty if positions were not counted."""
    positions = [each.positions for each in passed]
    known = sum(filter(None, positions))
    return {"padding_efficiency": _tokens(TRAIN, passed) / known} if known and None not in positions else {}


def _working(seconds: Mapping[str, float]) -> list[float]:
    """Return the seconds of the top-level phases in which the devices work."""
    names = {name: name.removesuffix("_s") for name in seconds if name != STEP_SECONDS and "/" not in name}
    return [
        seconds[name]
        for name, phase in names.items()
        # Overlapping phases would count twice.
        if phase not in WAITING | beside_training(names.values())
    ]
