"""Throughput of a step, by phase: tokens per second, operations per second and their share of the devices'
peak."""

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
    """Number of devices of a run.

    Attributes:
        training: devices of the policy.
        generating: devices of the engines; the policy's if it generates itself or shares its devices.
        together: all devices, each counted once.
        peak: peak FLOP/s of one device.
    """

    training: int
    generating: int
    together: int
    peak: float


@dataclass(frozen=True, slots=True)
class StepThroughput:
    """Calculator of the rates that a step reached.

    Attributes:
        devices: devices of the run.
        flops: operations of the model; None if its sizes are unknown, and then only tokens are counted.
        recomputes: whether layers, or parts of them, are recomputed in the backward pass.
        recomputed: the recomputed parts; None for whole layers.
        frozen_routers: whether routers are frozen.
        adapters: adapter parameters that each token uses, if only adapters are trained; otherwise None.
    """

    devices: Devices
    flops: ModelFlops | None
    recomputes: bool = False
    frozen_routers: bool = False
    recomputed: Collection[str] | None = None
    adapters: int | None = None

    @classmethod
    def of(cls, policy: PolicyConfig, facts: ModelFacts | None, devices: Devices) -> StepThroughput:
        """Return the calculator for a run with this complete ``policy`` section."""
        backend = enabled_backend(policy)
        flops = None if facts is None else ModelFlops.of(facts)
        peft = adapters_of(policy)
        adapters = None
        if peft is not None and facts is not None:
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
        """Return the throughput figures of one step.

        Args:
            tokens: tokens of the step's samples, without padding.
            seconds: seconds of the phases, from ``PhaseTimer.collect``.
            sequences: the sequences that each phase processed, from ``PhaseTimer.take_sequences``; phases
                inside others, such as those of a validation, do not count.

        Returns:
            For each phase with sequences, such as ``train``: ``train_tokens_per_s`` (generation: sampled
            tokens, other phases: all tokens without padding), ``train_tokens_per_s_per_device`` and, if the
            model's sizes are known, ``train_tflops`` (of one device) and ``train_mfu`` (share of
            ``peak_tflops``); with recomputation also ``train_hfu``, which counts it. The same figures without
            a phase's name are for the whole step, over all devices. ``padding_efficiency`` is tokens over
            positions of the training passes. ``idle_s`` is the seconds of the step in no phase, or in one in
            which the devices wait.
        """
        figures: dict[str, float] = {"peak_tflops": self.devices.peak / 1e12}
        model = hardware = 0.0
        for phase, passed in sequences.items():
            took = seconds.get(f"{phase}_s", 0.0)
            # The time of the outer phase already includes that of a phase within it.
            if took <= 0 or "/" in phase:
                continue
            work, extra = self._flops(phase, passed)
            model, hardware = model + work, hardware + work + extra
            count = self.devices.generating if phase == GENERATION else self.devices.training
            figures |= self._rates(f"{phase}_", _tokens(phase, passed), work, extra, took, count)
        step = seconds[STEP_SECONDS]
        if step > 0:
            figures |= self._rates("", tokens, model, hardware - model, step, self.devices.together)
        figures |= _padding(sequences.get(TRAIN, ()))
        figures["idle_s"] = max(0.0, step - math.fsum(_working(seconds)))
        return figures

    def _flops(self, phase: str, passed: Sequence[Sequences]) -> tuple[float, float]:
        """Return the operations of the model, and those of recomputing parts of it."""
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
            if extra:
                rates[f"{prefix}hfu"] = (work + extra) / seconds / devices / self.devices.peak
        return rates


def _tokens(phase: str, passed: Sequence[Sequences]) -> int:
    """Return the number of sampled tokens for generation, and of all tokens for other phases."""
    tokens = 0
    for each in passed:
        tokens += int(np.sum(each.lengths))
        if phase == GENERATION:
            tokens -= int(np.sum(each.prompt_lengths))
    return tokens


def _padding(passed: Sequence[Sequences]) -> dict[str, float]:
    """Return tokens over positions as ``padding_efficiency``; empty if some positions are unknown."""
    positions = [each.positions for each in passed]
    known = sum(filter(None, positions))
    return {"padding_efficiency": _tokens(TRAIN, passed) / known} if known and None not in positions else {}


def _working(seconds: Mapping[str, float]) -> list[float]:
    """Return the seconds of the top-level phases in which devices work."""
    names = {name: name.removesuffix("_s") for name in seconds if name != STEP_SECONDS and "/" not in name}
    return [
        seconds[name]
        for name, phase in names.items()
        if phase not in WAITING | beside_training(names.values())
    ]
