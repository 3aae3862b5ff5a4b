"""Rates of a step, and the peaks of devices."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from converters.model_config.architecture import ModelFacts
from megarl.algorithms.train_results import scored_tokens
from megarl.config.model_facts import facts_of
from megarl.errors import StateError
from megarl.observe.step_line import throughput_line
from megarl.observe.timing import PhaseTimer, Sequences
from megarl.throughput.flops import ModelFlops
from megarl.throughput.peaks import PEAK_TFLOPS, known_peak, measured_rate
from megarl.throughput.step import Devices, StepThroughput

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 12,
    "intermediate_size": 20,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 4,
    "vocab_size": 17,
}
FACTS: ModelFacts = facts_of(CONFIG)
FLOPS = ModelFlops.of(FACTS)
DEVICES = Devices(training=2, generating=3, together=5, peak=1e9)


def lengths(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64)


GENERATED = Sequences(lengths(9, 7, 8), lengths(5, 5, 8), lengths(5, 8))
TRAINED = Sequences(lengths(9, 7, 8), positions=30)
SECONDS = {"generation_s": 2.0, "train_s": 4.0, "reward_s": 1.0, "train/optimizer_s": 1.0, "step_s": 8.0}


def test_each_phase_has_rates_over_its_own_devices() -> None:
    throughput = StepThroughput(DEVICES, FLOPS)
    figures = throughput.metrics(24, SECONDS, {"generation": [GENERATED], "train": [TRAINED]})
    sampled = FLOPS.generation([5, 8], [5, 5, 8], [9, 7, 8])
    trained = FLOPS.training([9, 7, 8])
    assert figures["generation_tokens_per_s"] == 6 / 2
    assert figures["generation_tokens_per_s_per_device"] == 6 / 2 / 3
    assert figures["generation_mfu"] == pytest.approx(sampled / 2 / 3 / 1e9)
    assert figures["train_tokens_per_s"] == 24 / 4
    assert figures["train_tflops"] == pytest.approx(trained / 4 / 2 / 1e12)
    assert figures["tokens_per_s"] == 24 / 8
    assert figures["tokens_per_s_per_device"] == 24 / 8 / 5
    assert figures["mfu"] == pytest.approx((sampled + trained) / 8 / 5 / 1e9)
    assert figures["padding_efficiency"] == 24 / 30
    # neither rewards nor what no phase covers keep a device busy; what a phase contains counts once
    assert figures["idle_s"] == 8 - 2 - 4
    assert "train_hfu" not in figures and "hfu" not in figures


def test_several_passes_of_a_phase_add_up_and_a_validation_does_not_count() -> None:
    throughput = StepThroughput(DEVICES, FLOPS)
    alone = throughput.metrics(24, SECONDS, {"train": [TRAINED]})
    seconds = {**SECONDS, "validation_s": 0.5, "validation/generation_s": 0.4}
    both = throughput.metrics(
        48, seconds, {"train": [TRAINED, TRAINED], "validation/generation": [GENERATED]}
    )
    assert both["train_mfu"] == pytest.approx(2 * alone["train_mfu"])
    assert both["padding_efficiency"] == alone["padding_efficiency"]
    assert not any("generation" in name for name in both)


def test_an_output_layer_that_skips_masked_tokens_does_less_work() -> None:
    skipping = Sequences(lengths(9, 7, 8), positions=30, scored=11)
    passed = {"logprobs": [skipping], "train": [skipping]}
    figures = StepThroughput(DEVICES, FLOPS).metrics(24, {**SECONDS, "logprobs_s": 4.0}, passed)
    forward = FLOPS.forward([9, 7, 8]) - 13 * 2 * FACTS.hidden_size * FACTS.vocab_size
    assert figures["logprobs_tflops"] == pytest.approx(forward / 4 / 2 / 1e12)
    assert figures["train_tflops"] == pytest.approx(3 * forward / 4 / 2 / 1e12)
    masks = {
        "token_mask": torch.tensor([[1, 0, 1, 1], [0, 0, 1, 0], [1, 1, 1, 1]]),
        "sample_mask": torch.tensor([1.0, 1.0, 0.0]),
    }
    assert scored_tokens(masks) == 3


def test_recomputation_counts_for_the_hardware_alone() -> None:
    plain, again = (
        StepThroughput(DEVICES, FLOPS, recomputes=value).metrics(24, SECONDS, {"train": [TRAINED]})
        for value in (False, True)
    )
    assert again["train_mfu"] == plain["train_mfu"]
    work = FLOPS.training([9, 7, 8]) + FLOPS.forward([9, 7, 8], logits=0)
    assert again["train_hfu"] == pytest.approx(work / 4 / 2 / 1e9)
    assert again["hfu"] == pytest.approx(work / 8 / 5 / 1e9)


def test_unknown_models_and_phases_that_took_no_time_have_what_can_be_said() -> None:
    figures = StepThroughput(DEVICES, None).metrics(
        24, {"train_s": 0.0, "step_s": 8.0}, {"train": [Sequences(lengths(9, 15))]}
    )
    assert figures == {
        "peak_tflops": 1e-3,
        "tokens_per_s": 3.0,
        "tokens_per_s_per_device": 0.6,
        "idle_s": 8.0,
    }
    assert "tflops" in StepThroughput(DEVICES, FLOPS).metrics(0, {"step_s": 0.5}, {})


@pytest.mark.parametrize(
    ("backend", "section", "recomputes", "frozen"),
    [
        (
            "megatron",
            {"activation_checkpointing": True, "recompute_granularity": "full", "freeze_moe_router": True},
            True,
            True,
        ),
        ("dtensor", {"activation_checkpointing": True}, True, False),
        ("dtensor", {"activation_checkpointing": False}, False, False),
        ("fsdp1", {}, True, False),
    ],
)
def test_what_a_configuration_says(
    backend: str, section: dict[str, Any], recomputes: bool, frozen: bool
) -> None:
    other = backend != "fsdp1"
    policy = {
        "activation_checkpointing_enabled": not other,
        **({f"{backend}_cfg": {"enabled": True, **section}} if other else {}),
    }
    throughput = StepThroughput.of(policy, FACTS, DEVICES)
    assert (throughput.recomputes, throughput.frozen_routers, throughput.flops) == (recomputes, frozen, FLOPS)


def test_a_timer_keeps_sequences_by_phase() -> None:
    timer = PhaseTimer()
    with pytest.raises(StateError, match="no phase is open"):
        timer.passed(TRAINED)
    with timer.phase("validation"), timer.phase("generation"):
        timer.passed(GENERATED)
    with timer.phase("train"):
        timer.passed(TRAINED)
        timer.passed(TRAINED)
    assert timer.take_sequences() == {"validation/generation": [GENERATED], "train": [TRAINED, TRAINED]}
    assert timer.take_sequences() == {}


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756.5),
        ("NVIDIA H100 NVL", 835.5),
        ("NVIDIA H200", 989.4),
        ("NVIDIA A100-SXM4-80GB", 311.9),
        ("NVIDIA A10", 125.0),
        ("NVIDIA A10G", 70.0),
        ("NVIDIA L40S", 362.1),
        ("NVIDIA GB200", 2500.0),
        ("NVIDIA B200", 2250.0),
        ("NVIDIA H20", 148.0),
        ("NVIDIA L40", None),
        ("NVIDIA H2000", None),
        ("cpu", None),
        ("", None),
    ],
)
def test_a_peak_is_that_of_the_whole_name(name: str, tflops: float | None) -> None:
    assert (
        known_peak(name, "bfloat16")
        == known_peak(name, "float16")
        == (None if tflops is None else tflops * 1e12)
    )
    assert known_peak(name, "float32") is None


def test_peaks_are_in_tflops() -> None:
    assert all(50 < value < 5000 for value in PEAK_TFLOPS.values())


def test_a_measured_rate_is_that_of_the_product() -> None:
    """Within a factor of the same product timed in another way; a product counted once instead of twice, or
    in bytes, is farther off."""
    import time

    left = torch.ones(512, 512)
    left @ left
    start = time.perf_counter()
    for _ in range(20):
        left @ left
    rate = 20 * 2 * 512**3 / (time.perf_counter() - start)
    assert 0.2 * rate < measured_rate(torch.device("cpu"), "float32") < 20 * rate


def test_the_line_of_the_console_says_what_is_known() -> None:
    metrics = {
        "performance/generation_tokens_per_s": 2310.0,
        "performance/generation_mfu": 0.12,
        "performance/train_tokens_per_s": 6100.0,
        "performance/train_mfu": 0.034,
        "performance/padding_efficiency": 0.85,
        "performance/idle_s": 0.02,
    }
    line = "generation 2.3k tok/s, MFU 12%; training 6.1k tok/s, MFU 3.4%; padding efficiency 85%; idle 0.02s"
    assert throughput_line(metrics) == line
    assert throughput_line({"performance/tokens_per_s": 5.0, "performance/idle_s": 1.0}) == ""
    assert throughput_line({"performance/logprobs_tokens_per_s": 50.0}) == "log-probs 50 tok/s"
