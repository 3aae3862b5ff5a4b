"""Throughput of a step: tokens a second, operations a second and their share of the devices' peak, of each
phase."""

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
"""Phases in which the devices have nothing to do."""


@dataclass(frozen=True, slots=True)
class Devices:
    """Devices of a run.

    Attributes:
        training: of the policy.
        generating: of the engines; the policy's where it generates itself or shares its devices.
        together: of both, each counted once.
        peak: FLOP/s of one at its best.
    """

    training: int
    generating: int
    together: int
    peak: float


@dataclass(frozen=True, slots=True)
class StepThroughput:
    """Rates that a step reached.

    Attributes:
        devices: of the run.
        flops: operations of the model; None where its sizes are not known, and then only tokens are counted.
        recomputes: every layer is computed again in the backward pass, or parts of it.
        recomputed: those parts; None for all.
        frozen_routers: routers are not trained.
        adapters: parameters of the adapters that a token goes through, which alone are trained; None without.
    """

    devices: Devices
    flops: ModelFlops | None
    recomputes: bool = False
    frozen_routers: bool = False
    recomputed: Collection[str] | None = None
    adapters: int | None = None

    @classmethod
    def of(cls, policy: PolicyConfig, facts: ModelFacts | None, devices: Devices) -> StepThroughput:
        """The throughput of a run with this complete ``policy`` section."""
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
        """Return figures of one step.

        Args:
            tokens: of the step's samples, without padding.
            seconds: of the phases, as ``PhaseTimer.collect`` gives them.
            sequences: what each phase went through, as ``PhaseTimer.take_sequences`` gives it; phases inside
                others, such as those of a validation, do not count.

        Returns:
            For each phase with sequences, such as ``train``: ``train_tokens_per_s`` (generation: sampled
            tokens, other phases: all tokens without padding), ``train_tokens_per_s_per_device`` and, where
            the model's sizes are known, ``train_tflops`` (of one device) and ``train_mfu`` (share of
            ``peak_tflops``); with recomputation also ``train_hfu``, which counts it. The same without a
            phase's name: for the whole step, over all devices. ``padding_efficiency``: tokens over positions
            of the training passes. ``idle_s``: seconds of the step in no phase, or in one in which the
            devices wait.
        """
        figures: dict[str, float] = {"peak_tflops": self.devices.peak / 1e12}
        model = hardware = 0.0
        for phase, passed in sequences.items():
            took = seconds.get(f"{phase}_s", 0.0)
            # a phase within another is a part of its time already
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
        """Return operations of the model, and of recomputing parts of it."""
        if self.flops is None:
            return 0.0, 0.0
        if phase == GENERATION:
            return math.fsum(
                self.flops.generation(each.prompts, each.prompt_lengths, each.lengths) for each in passed
            ), 0.0
        if phase not in (TRAIN, TRAIN_CRITIC):
            return math.fsum(self.flops.forward(each.lengths, each.scored) for each in passed), 0.0
        again = (
            math.fsum(self.flops.recomputation(each.lengths, self.recomputed) for each in passed)
            if self.recomputes
            else 0.0
        )
        # the policy's adapters are not its critic's
        routers, adapters = self.frozen_routers, self.adapters if phase == TRAIN else None
        trained = (
            self.flops.training(each.lengths, each.scored, frozen_routers=routers, adapters=adapters)
            for each in passed
        )
        return math.fsum(trained), again

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
    """Sampled tokens, or all."""
    before = sum(int(np.sum(each.prompt_lengths)) for each in passed) if phase == GENERATION else 0
    return sum(int(np.sum(each.lengths)) for each in passed) - before


def _padding(passed: Sequence[Sequences]) -> dict[str, float]:
    """Return tokens over positions, where all positions are known."""
    positions = [each.positions for each in passed]
    known = sum(count for count in positions if count is not None)
    return {"padding_efficiency": _tokens(TRAIN, passed) / known} if known and None not in positions else {}


def _working(seconds: Mapping[str, float]) -> list[float]:
    """Return seconds of the phases of the top level in which devices work."""
    names = {name: name.removesuffix("_s") for name in seconds if name != STEP_SECONDS and "/" not in name}
    return [
        seconds[name]
        for name, phase in names.items()
        if phase not in WAITING | beside_training(names.values())
    ]
