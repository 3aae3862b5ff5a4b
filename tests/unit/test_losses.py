"""The losses against plain float64 loops written from the formulas, and their invariances."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from megarl.algorithms.interfaces import LossFunction, LossInputType, LossType, check_loss, checked_result
from megarl.algorithms.loss_functions import ClippedPGLossFn, DPOLossFn, NLLLoss
from megarl.algorithms.utils import calculate_kl_penalty_joschu2020, masked_mean
from megarl.errors import BatchError, ConfigError
from megarl.models.engine.heads import _loss_of
from megarl.models.engine.normalizers import Normalizers
from megarl.observe.metrics import reduce_metrics
from megarl.rollout.samples import mismatch_metrics

PG_CONFIG = {
    "reference_policy_kl_penalty": 0.3,
    "ratio_clip_min": 0.2,
    "ratio_clip_max": 0.28,
    "ratio_clip_c": 1.7,
    "use_on_policy_kl_approximation": True,
    "use_importance_sampling_correction": True,
    "token_level_loss": True,
}
WITHOUT_DIVERGENCE = {"reference_policy_kl_penalty": 0.0, "use_on_policy_kl_approximation": False}
DPO_CONFIG = {
    "reference_policy_kl_penalty": 0.4,
    "preference_loss_weight": 0.9,
    "sft_loss_weight": 0.25,
    "preference_average_log_probs": False,
    "sft_average_log_probs": False,
}


def policy_gradient_batch(seed: int, rows: int = 6, length: int = 7) -> dict[str, Tensor]:
    """Float64 data with holes in the token mask, one dropped row and one row without target tokens."""
    generator = torch.Generator().manual_seed(seed)
    normal = lambda: torch.randn(rows, length, generator=generator, dtype=torch.float64)  # noqa: E731
    base = -normal().abs()
    token_mask = (torch.rand(rows, length, generator=generator) > 0.3).double()
    token_mask[-1] = 0.0
    sample_mask = torch.ones(rows, dtype=torch.float64)
    sample_mask[1] = 0.0
    entropies = torch.rand(
        rows, length, generator=torch.Generator().manual_seed(seed + 1), dtype=torch.float64
    )
    return {
        "input_ids": torch.zeros(rows, length, dtype=torch.int64),
        "advantages": normal(),
        "prev_logprobs": base + 0.3 * normal(),
        "generation_logprobs": base + 0.3 * normal(),
        "reference_policy_logprobs": base + 0.3 * normal(),
        "current": base + 0.5 * normal(),
        "entropies": 2 * entropies,
        "token_mask": token_mask,
        "sample_mask": sample_mask,
    }


def normalizers(data: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    tokens = (data["token_mask"][:, 1:] * data["sample_mask"][:, None]).sum()
    return data["sample_mask"].sum(), tokens


def slow_policy_gradient(
    data: dict[str, Tensor], config: dict[str, Any], total_rows: float, total_tokens: float
) -> dict[str, float]:
    """The formulas of the contract, one token at a time."""
    out = dict.fromkeys(
        ("loss", "probs_ratio", "probs_ratio_clamped", "kl_penalty", "token_mult_prob_error"), 0.0
    )
    out |= dict.fromkeys(("sampling_importance_ratio", "approx_entropy"), 0.0)
    low, high, ceiling = 1 - config["ratio_clip_min"], 1 + config["ratio_clip_max"], config["ratio_clip_c"]
    for row in range(data["advantages"].shape[0]):
        policy_sum = kl_sum = count = 0.0
        for place in range(1, data["advantages"].shape[1]):
            if not data["token_mask"][row, place]:
                continue
            advantage, previous, generation, reference, current = (
                float(data[key][row, place])
                for key in (
                    "advantages",
                    "prev_logprobs",
                    "generation_logprobs",
                    "reference_policy_logprobs",
                    "current",
                )
            )
            ratio = math.exp(current - previous)
            clamped = min(max(ratio, low), high)
            if config.get("disable_ppo_ratio"):
                ratio = clamped = current
            value = max(-advantage * ratio, -advantage * clamped)
            if ceiling is not None and advantage < 0:
                value = min(value, -advantage * ceiling)
            weight = math.exp(previous - generation)
            kl = math.exp(reference - current) - (reference - current) - 1
            if config["use_on_policy_kl_approximation"]:
                kl *= math.exp(current - generation)
            count += 1
            policy_sum += value * (weight if config["use_importance_sampling_correction"] else 1)
            kl_sum += kl
            if data["sample_mask"][row]:
                out["probs_ratio"] += ratio / total_tokens
                out["probs_ratio_clamped"] += clamped / total_tokens
                out["token_mult_prob_error"] += math.exp(abs(generation - previous)) / total_tokens
                out["sampling_importance_ratio"] += weight / total_tokens
                out["approx_entropy"] -= math.exp(current - generation) * current / total_tokens
        if data["sample_mask"][row]:
            scale = 1 / total_tokens if config["token_level_loss"] else 1 / max(count, 1) / total_rows
            out["loss"] += (policy_sum + config["reference_policy_kl_penalty"] * kl_sum) * scale
            out["kl_penalty"] += kl_sum * scale
    return out


VARIANTS = [
    {},
    {"token_level_loss": False},
    {"ratio_clip_c": None},
    {"use_importance_sampling_correction": False, "use_on_policy_kl_approximation": False},
    {
        "reference_policy_kl_penalty": 0.0,
        "use_on_policy_kl_approximation": False,
        "token_level_loss": False,
        "ratio_clip_c": None,
    },
    {"disable_ppo_ratio": True, "ratio_clip_c": None},
    {"ratio_clip_min": 0.0, "ratio_clip_max": 0.0},
]


@pytest.mark.parametrize("change", VARIANTS, ids=str)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_policy_gradient_equals_the_formulas(change: dict[str, Any], seed: int) -> None:
    config = PG_CONFIG | change
    data = policy_gradient_batch(seed)
    rows, tokens = normalizers(data)
    loss, metrics = ClippedPGLossFn(config)(data, rows, tokens, next_token_logprobs=data["current"][:, 1:])
    for name, expected in slow_policy_gradient(data, config, float(rows), float(tokens)).items():
        if name != "kl_penalty" or config["reference_policy_kl_penalty"]:
            assert float(metrics[name]) == pytest.approx(expected, rel=1e-7, abs=1e-12), name
    assert float(loss) == float(metrics["loss"])
    assert float(metrics["num_valid_samples"]) == float(rows)


@pytest.mark.parametrize("off_policy", [False, True])
@pytest.mark.parametrize("distance", [0.1, 0.5, 1.0, 2.0])
def test_the_exact_kl_gradient_is_that_of_the_divergence(distance: float, off_policy: bool) -> None:
    """The expectation over all twenty actions of one position, against autograd through the divergence
    itself."""
    generator = torch.Generator().manual_seed(20)
    normal = lambda: torch.randn(20, generator=generator, dtype=torch.float64)  # noqa: E731
    logits = normal().requires_grad_()
    policy = torch.log_softmax(logits, 0)
    reference = torch.log_softmax(logits.detach() + distance * normal(), 0)
    drawn_from = torch.log_softmax(logits.detach() + 0.3 * normal(), 0) if off_policy else policy.detach()
    divergence = (policy.exp() * (policy - reference)).sum()
    (true,) = torch.autograd.grad(divergence, logits, retain_graph=True)

    def column(values: Tensor) -> Tensor:
        return torch.stack((torch.zeros_like(values), values), dim=1)

    def expected(form: str) -> Tensor:
        unclamped = {
            "kl_input_clamp_value": None,
            "kl_output_clamp_value": None,
            "log_ratio_clamp_value": None,
        }
        config = (
            PG_CONFIG
            | unclamped
            | {"use_on_policy_kl_approximation": off_policy, "reference_policy_kl_gradient": form}
        )
        # the expectation is the sum over actions weighted by how often each is drawn: advantages are 0, so
        # the divergence alone is left
        data = {
            "advantages": torch.zeros(20, 2, dtype=torch.float64),
            "prev_logprobs": column(drawn_from),
            "generation_logprobs": column(drawn_from),
            "reference_policy_logprobs": column(reference),
            "token_mask": column(drawn_from.exp()),
            "sample_mask": torch.ones(20, dtype=torch.float64),
        }
        one = torch.ones((), dtype=torch.float64)
        loss, metrics = ClippedPGLossFn(config)(data, one, one, next_token_logprobs=policy[:, None])
        assert float(metrics["kl_penalty"]) == pytest.approx(divergence.item(), rel=1e-6)
        return torch.autograd.grad(loss / config["reference_policy_kl_penalty"], logits, retain_graph=True)[0]

    torch.testing.assert_close(expected("exact"), true, rtol=1e-6, atol=1e-12)
    cosine = torch.nn.functional.cosine_similarity(expected("pathwise"), true, dim=0)
    assert cosine < 0.9999, "the other form is another gradient"


CLAMPS = {"log_ratio_clamp_value": 2.0, "kl_input_clamp_value": 2.0, "kl_output_clamp_value": 1.5}


@pytest.mark.parametrize("off_policy", [False, True])
@pytest.mark.parametrize("form", ["exact", "pathwise"])
@pytest.mark.parametrize("reference", [-0.5, -1.9, -2.1, -4.0, -50.0, -2000.0, 0.5, 1.4, 1.6, 50.0, 2000.0])
def test_clamped_divergence(reference: float, form: str, off_policy: bool) -> None:
    """Values are clamped; the gradient is that of the clamped difference, and of the own one of k3 as far as
    k3 itself is bounded."""
    current = torch.tensor([[-0.7]], dtype=torch.float64, requires_grad=True)
    data = {
        "advantages": torch.zeros(1, 2, dtype=torch.float64),
        "prev_logprobs": torch.full((1, 2), -0.7, dtype=torch.float64),
        "generation_logprobs": torch.full((1, 2), -0.9, dtype=torch.float64),
        "reference_policy_logprobs": torch.full((1, 2), -0.7 + reference, dtype=torch.float64),
        "token_mask": torch.ones(1, 2, dtype=torch.float64),
        "sample_mask": torch.ones(1, dtype=torch.float64),
    }
    config = PG_CONFIG | CLAMPS | {"reference_policy_kl_penalty": 1.0, "reference_policy_kl_gradient": form}
    config["use_on_policy_kl_approximation"] = off_policy
    one = torch.ones((), dtype=torch.float64)
    loss, metrics = ClippedPGLossFn(config)(data, one, one, next_token_logprobs=current)
    (gradient,) = torch.autograd.grad(loss, current)
    weight = math.exp(0.2) if off_policy else 1.0
    difference = min(max(reference, -2.0), 2.0)
    estimate = min(math.exp(difference) - difference - 1, 1.5)
    assert float(loss.detach()) == pytest.approx(weight * estimate)
    slope = -difference if form == "exact" else max(1 - math.exp(difference), -(1.5 + max(difference, 0.0)))
    assert float(gradient) == pytest.approx(weight * slope)
    assert float(metrics["kl_clamped_share"]) == pytest.approx(
        float(reference != difference or estimate == 1.5)
    )


@pytest.mark.parametrize("advantage", [-1.0, 0.0, 1.0])
@pytest.mark.parametrize("log_ratio", [-200.0, -21.0, -19.0, -0.1, 0.1, 19.0, 21.0, 89.0, 200.0])
@pytest.mark.parametrize("ceiling", [None, 3.0])
def test_a_far_log_ratio_leaves_no_infinity_in_a_gradient(
    log_ratio: float, advantage: float, ceiling: float | None
) -> None:
    """The branch that clipping discards must not turn 0 times infinity into NaN; float32, where exp(89)
    overflows."""
    current = torch.tensor([[-300.0]], requires_grad=True)
    data = {
        "advantages": torch.full((1, 2), advantage),
        "prev_logprobs": torch.full((1, 2), -300.0 - log_ratio),
        "generation_logprobs": torch.full((1, 2), -300.0 - log_ratio),
        "reference_policy_logprobs": torch.full((1, 2), -300.0 - log_ratio),
        "token_mask": torch.ones(1, 2),
        "sample_mask": torch.ones(1),
    }
    config = PG_CONFIG | WITHOUT_DIVERGENCE | {"ratio_clip_c": ceiling}
    loss, _ = ClippedPGLossFn(config)(data, torch.ones(()), torch.ones(()), next_token_logprobs=current)
    (gradient,) = torch.autograd.grad(loss, current)
    ratio = math.exp(min(max(log_ratio, -20.0), 20.0))
    clipped = min(max(ratio, 0.8), 1.28)
    kept = -advantage * ratio >= -advantage * clipped and not (
        ceiling and advantage < 0 and -advantage * ratio > -advantage * ceiling
    )
    assert float(loss.detach()) == pytest.approx(
        min(
            max(-advantage * ratio, -advantage * clipped),
            -advantage * ceiling if ceiling and advantage < 0 else math.inf,
        ),
        rel=1e-5,
    )
    assert float(gradient) == pytest.approx(
        -advantage * ratio if kept and abs(log_ratio) < 20 else 0.0, rel=1e-4
    )
    penalised = PG_CONFIG | {"reference_policy_kl_penalty": 0.5}
    loss, _ = ClippedPGLossFn(penalised)(data, torch.ones(()), torch.ones(()), next_token_logprobs=current)
    assert bool(torch.isfinite(torch.autograd.grad(loss, current)[0]).all()) and math.isfinite(
        float(loss.detach())
    )


def all_losses() -> list[LossFunction]:
    return [
        ClippedPGLossFn(PG_CONFIG),
        ClippedPGLossFn(PG_CONFIG | {"token_level_loss": False}),
        NLLLoss(),
        DPOLossFn(DPO_CONFIG),
        DPOLossFn(DPO_CONFIG | {"preference_average_log_probs": True, "sft_average_log_probs": True}),
        ClippedPGLossFn(PG_CONFIG | {"force_on_policy_ratio": True, "ratio_clip_c": None}),
    ]


@pytest.mark.parametrize("which", range(6))
@pytest.mark.parametrize("pieces", [[2, 4], [4, 2], [2, 2, 2]])
def test_micro_batches_sum_to_the_whole(which: int, pieces: list[int]) -> None:
    loss_fn = all_losses()[which]
    data = policy_gradient_batch(6)
    rows, tokens = normalizers(data)
    whole = data["current"][:, 1:].clone().requires_grad_()
    whole_loss, whole_metrics = loss_fn(data, rows, tokens, next_token_logprobs=whole)
    whole_loss.backward()

    split = data["current"][:, 1:].clone().requires_grad_()
    collected: dict[str, list[float]] = {}
    start = 0
    for piece in pieces:
        part = {key: value[start : start + piece] for key, value in data.items()}
        loss, metrics = loss_fn(part, rows, tokens, next_token_logprobs=split[start : start + piece])
        loss.backward()
        start += piece
        for name, value in metrics.items():
            collected.setdefault(name, []).append(float(value))
    assert set(collected) == set(loss_fn.metric_reductions)
    reduced = reduce_metrics(collected, loss_fn.metric_reductions)
    for name, value in whole_metrics.items():
        assert reduced[name] == pytest.approx(float(value), rel=1e-12), name
    torch.testing.assert_close(split.grad, whole.grad, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("which", range(6))
@pytest.mark.parametrize("empty", ["token_mask", "sample_mask"])
def test_nothing_valid_gives_zero_loss_and_zero_gradient(which: int, empty: str) -> None:
    data = policy_gradient_batch(7)
    data[empty].zero_()
    rows, tokens = normalizers(data)
    current = data["current"][:, 1:].clone().requires_grad_()
    loss_fn = all_losses()[which]
    loss, metrics = loss_fn(data, rows, tokens, next_token_logprobs=current)
    loss.backward()
    if isinstance(loss_fn, DPOLossFn) and empty == "token_mask":
        assert float(loss) == pytest.approx(
            0.9 * math.log(2) * 2 / 5 * 2
        )  # two whole pairs with rewards of 0 of 5 valid rows
    else:
        assert float(loss) == 0.0
    assert torch.equal(current.grad, torch.zeros_like(current))
    assert not any(math.isnan(float(value)) for value in metrics.values())


@pytest.mark.parametrize("which", range(6))
@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf, 1e300])
def test_masked_positions_never_matter(which: int, garbage: float) -> None:
    data = policy_gradient_batch(8)
    rows, tokens = normalizers(data)
    loss_fn = all_losses()[which]
    clean = data["current"][:, 1:].clone().requires_grad_()
    clean_loss, _ = loss_fn(data, rows, tokens, next_token_logprobs=clean)
    clean_loss.backward()

    hidden = (data["token_mask"] * data["sample_mask"][:, None]) == 0
    hidden[:, 0] = True
    dirty_data = dict(data)
    for key in ("advantages", "prev_logprobs", "generation_logprobs"):
        dirty_data[key] = torch.where(hidden, garbage, data[key])
    if not isinstance(loss_fn, DPOLossFn):
        dirty_data["reference_policy_logprobs"] = torch.where(
            hidden, garbage, data["reference_policy_logprobs"]
        )
    dirty = torch.where(hidden[:, 1:], garbage, data["current"][:, 1:]).requires_grad_()
    loss, _ = loss_fn(dirty_data, rows, tokens, next_token_logprobs=dirty)
    loss.backward()
    assert float(loss) == float(clean_loss)
    assert torch.equal(dirty.grad, clean.grad)


@pytest.mark.parametrize("generation", [-math.inf, -1000.0, math.nan])
def test_importance_weights_that_overflow_count_as_zero_and_are_counted(generation: float) -> None:
    data = policy_gradient_batch(9)
    data["token_mask"].fill_(1)
    data["generation_logprobs"][0, 2] = generation
    # the token alone has a weight in the divergence too, which is 0 as well
    config = PG_CONFIG | {"truncated_importance_sampling_type": None}
    current = data["current"][:, 1:].clone().requires_grad_()
    loss, metrics = ClippedPGLossFn(config)(data, *normalizers(data), next_token_logprobs=current)
    assert float(metrics["nonfinite_importance_weights"]) == 1
    without = data | {"token_mask": data["token_mask"].clone()}
    without["token_mask"][0, 2] = 0
    other = data["current"][:, 1:].clone().requires_grad_()
    expected, _ = ClippedPGLossFn(config)(without, *normalizers(data), next_token_logprobs=other)
    assert float(loss.detach()) == pytest.approx(float(expected.detach()), rel=1e-12)
    torch.testing.assert_close(
        torch.autograd.grad(loss, current)[0], torch.autograd.grad(expected, other)[0], rtol=1e-12, atol=0
    )


@pytest.mark.parametrize(
    ("kind", "of_sequences"),
    [("tis", False), ("tis", True), ("icepop", False), ("icepop", True), ("seq-mask-tis", False)],
)
@pytest.mark.parametrize("log_weight", [0.5, 5.0, 88.0, 89.0, 500.0, math.inf, math.nan])
def test_bounded_weights_of_any_size(log_weight: float, of_sequences: bool, kind: str) -> None:
    """One token of float32, where exp(89) is infinite: ``tis`` has the bound there, others 0. A NaN has the
    weight 0."""
    data = single_token(previous=-1.0, generation=-1.0 - log_weight)
    settings = {"truncated_importance_sampling_type": kind, "truncated_importance_sampling_ratio": 2.0}
    settings |= {"sequence_level_importance_ratios": of_sequences, "token_level_loss": not of_sequences}
    current = torch.tensor([[-1.0]], requires_grad=True)
    one = torch.ones(())
    loss, metrics = ClippedPGLossFn(PG_CONFIG | WITHOUT_DIVERGENCE | settings)(
        data, one, one, next_token_logprobs=current
    )
    (gradient,) = torch.autograd.grad(loss, current)
    beyond = 2.0 if kind == "tis" else 0.0
    weight = math.exp(0.5) if log_weight == 0.5 else 0.0 if math.isnan(log_weight) else beyond
    assert float(loss.detach()) == pytest.approx(-weight) and float(gradient) == pytest.approx(-weight)
    assert float(metrics["nonfinite_importance_weights"]) == (not log_weight <= 88)


def single_token(
    *, previous: float, generation: float, reference: float = -1.0, advantage: float = 1.0
) -> dict[str, Tensor]:
    """One row with one token, float32."""
    values = {
        "advantages": advantage,
        "prev_logprobs": previous,
        "generation_logprobs": generation,
        "reference_policy_logprobs": reference,
    }
    return {
        "token_mask": torch.ones(1, 2),
        "sample_mask": torch.ones(1),
        **{name: torch.full((1, 2), value) for name, value in values.items()},
    }


UNCLAMPED = {"log_ratio_clamp_value": None, "kl_input_clamp_value": None, "kl_output_clamp_value": None}


@pytest.mark.parametrize("advantage", [-1.0, 0.0, 1.0])
@pytest.mark.parametrize("distance", [-math.inf, -1000.0, -89.0, -1.0, 1.0, 88.0, 89.0, 1000.0, math.inf])
@pytest.mark.parametrize("kept", [*UNCLAMPED, None])
@pytest.mark.parametrize(
    "settings",
    [{}, {"use_cispo": True, "ratio_clip_c": None}, {"reference_policy_kl_gradient": "pathwise"}],
    ids=str,
)
def test_a_finite_loss_has_a_finite_gradient_without_clamps(
    settings: Any, kept: str | None, distance: float, advantage: float
) -> None:
    """Both clamps of the divergence or that of the ratio are null, or all; previous and reference are as far
    above the current one."""
    clamps = {name: None for name in UNCLAMPED if name != kept}
    for kind in ("k1", "k2", "k3"):
        config = (
            PG_CONFIG
            | settings
            | clamps
            | {"reference_policy_kl_type": kind, "use_on_policy_kl_approximation": False}
        )
        if kind != "k3" and "reference_policy_kl_gradient" in settings:
            continue
        for side in ("previous", "reference"):
            given = {"previous": -1.0, "reference": -1.0, side: -1.0 + distance}
            data = single_token(generation=given["previous"], advantage=advantage, **given)
            current, one = torch.tensor([[-1.0]], requires_grad=True), torch.ones(())
            loss, _ = ClippedPGLossFn(config)(data, one, one, next_token_logprobs=current)
            (gradient,) = torch.autograd.grad(loss, current)
            if math.isfinite(float(loss.detach())):
                assert math.isfinite(float(gradient)), (kind, side)


def test_a_broken_policy_is_not_hidden() -> None:
    data = policy_gradient_batch(10)
    data["token_mask"].fill_(1)
    data["current"][0, 2] = math.nan
    rows, tokens = normalizers(data)
    loss, _ = ClippedPGLossFn(PG_CONFIG)(data, rows, tokens, next_token_logprobs=data["current"][:, 1:])
    assert math.isnan(float(loss))


def test_ratio_extremes() -> None:
    data = policy_gradient_batch(11)
    rows, tokens = normalizers(data)
    _, metrics = ClippedPGLossFn(PG_CONFIG)(data, rows, tokens, next_token_logprobs=data["current"][:, 1:])
    mask = (data["token_mask"][:, 1:] * data["sample_mask"][:, None]).bool()
    ratios = torch.exp(data["current"] - data["prev_logprobs"])[:, 1:][mask]
    assert float(metrics["probs_ratio_min"]) == pytest.approx(float(ratios.min()))
    assert float(metrics["probs_ratio_max"]) == pytest.approx(float(ratios.max()))
    assert (
        0.8 <= float(metrics["probs_ratio_clamped_min"]) <= float(metrics["probs_ratio_clamped_max"]) <= 1.28
    )


@pytest.mark.parametrize(
    "change", [change for change in VARIANTS if "disable_ppo_ratio" not in change], ids=str
)
def test_a_forced_on_policy_ratio_is_one_and_needs_no_previous_logprobs(change: dict[str, Any]) -> None:
    """Loss, gradient and metrics are those of a batch whose previous log-probabilities are the present
    ones."""
    config = PG_CONFIG | change | {"ratio_clip_c": None}
    data = policy_gradient_batch(15)
    rows, tokens = normalizers(data)
    found = []
    for forced in (False, True):
        current = data["current"][:, 1:].clone().requires_grad_()
        batch = {**data, "prev_logprobs": data["current"]}
        if forced:
            del batch["prev_logprobs"]
        loss, metrics = ClippedPGLossFn(config | {"force_on_policy_ratio": forced})(
            batch, rows, tokens, next_token_logprobs=current
        )
        loss.backward()
        found.append((loss.detach(), current.grad, metrics))
    (loss, gradient, metrics), (forced_loss, forced_gradient, forced_metrics) = found
    assert torch.equal(loss, forced_loss) and torch.equal(gradient, forced_gradient) and gradient.any()
    assert all(torch.equal(forced_metrics[name], value) for name, value in metrics.items())
    assert forced_metrics["probs_ratio_min"] == forced_metrics["probs_ratio_max"] == 1.0
    mask = data["token_mask"] * data["sample_mask"][:, None]
    mask[:, 0] = 0.0
    for name, value in mismatch_metrics(data["generation_logprobs"], data["current"], mask).items():
        assert float(forced_metrics[name]) == pytest.approx(value, rel=1e-9), name


def test_a_mismatch_that_is_not_a_number_is_infinite() -> None:
    data = policy_gradient_batch(16)
    data["generation_logprobs"][0, 1:] = math.nan
    data["token_mask"][0, 1:] = 1.0
    rows, tokens = normalizers(data)
    loss_fn = ClippedPGLossFn(PG_CONFIG | {"force_on_policy_ratio": True, "ratio_clip_c": None})
    _, metrics = loss_fn(data, rows, tokens, next_token_logprobs=data["current"][:, 1:])
    assert float(metrics["mismatch_max"]) == float(metrics["mismatch_mean"]) == math.inf
    assert 0 < float(metrics["mismatch_share_above_0.05"]) <= 1
    data["generation_logprobs"] = data["current"] + 0.25
    _, metrics = loss_fn(data, rows, tokens, next_token_logprobs=data["current"][:, 1:])
    assert float(metrics["mismatch_max"]) == pytest.approx(0.25) and (data["token_mask"] == 0).any(), (
        "what is masked does not count"
    )


@pytest.mark.parametrize("bound", [1.0, 0.5, math.nan])
def test_dual_clip_bound_must_exceed_one(bound: float) -> None:
    with pytest.raises(AssertionError, match="ratio_clip_c") as caught:
        ClippedPGLossFn(PG_CONFIG | {"ratio_clip_c": bound})
    assert isinstance(caught.value, ConfigError)


def test_the_reference_is_needed_only_with_a_penalty() -> None:
    data = policy_gradient_batch(12)
    del data["reference_policy_logprobs"]
    rows, tokens = normalizers(data)
    ClippedPGLossFn(PG_CONFIG | WITHOUT_DIVERGENCE)(
        data, rows, tokens, next_token_logprobs=data["current"][:, 1:]
    )
    with pytest.raises(BatchError, match="reference_policy_logprobs"):
        ClippedPGLossFn(PG_CONFIG)(data, rows, tokens, next_token_logprobs=data["current"][:, 1:])


@pytest.mark.parametrize(
    "key", ["advantages", "prev_logprobs", "generation_logprobs", "token_mask", "sample_mask"]
)
def test_missing_and_misshapen_keys_are_named(key: str) -> None:
    data = policy_gradient_batch(13)
    rows, tokens = normalizers(data)
    current = data["current"][:, 1:]
    data[key] = data[key][:-1]
    with pytest.raises(BatchError, match=f"'{key}' has shape"):
        ClippedPGLossFn(PG_CONFIG)(data, rows, tokens, next_token_logprobs=current)
    del data[key]
    with pytest.raises(BatchError, match=f"needs the key '{key}'"):
        ClippedPGLossFn(PG_CONFIG)(data, rows, tokens, next_token_logprobs=current)


def test_nll_equals_the_formula_and_its_rows() -> None:
    data = policy_gradient_batch(14)
    rows, tokens = normalizers(data)
    current = data["current"][:, 1:]
    expected_rows = []
    for row in range(6):
        places = [
            place for place in range(1, 7) if data["token_mask"][row, place] and data["sample_mask"][row]
        ]
        expected_rows.append((-sum(float(data["current"][row, place]) for place in places), len(places)))
    loss, metrics = NLLLoss()(data, rows, tokens, next_token_logprobs=current)
    assert float(loss) == pytest.approx(sum(value for value, _ in expected_rows) / float(tokens))
    assert float(metrics["num_unmasked_tokens"]) == float(tokens)
    summed, row_metrics = NLLLoss()(data, rows, tokens, next_token_logprobs=current, dpo_loss=True)
    assert summed.tolist() == pytest.approx([value for value, _ in expected_rows])
    assert row_metrics["loss"].shape == (6,)
    averaged, _ = NLLLoss()(
        data, rows, tokens, next_token_logprobs=current, dpo_loss=True, dpo_average_log_probs=True
    )
    assert averaged.tolist() == pytest.approx([value / max(count, 1) for value, count in expected_rows])


@pytest.mark.parametrize("average_preference", [False, True])
@pytest.mark.parametrize("average_sft", [False, True])
@pytest.mark.parametrize("sft_weight", [0.0, 0.25])
def test_dpo_equals_the_formula(average_preference: bool, average_sft: bool, sft_weight: float) -> None:
    config = DPO_CONFIG | {
        "preference_average_log_probs": average_preference,
        "sft_average_log_probs": average_sft,
        "sft_loss_weight": sft_weight,
    }
    data = policy_gradient_batch(15, rows=8)
    data["sample_mask"][:2] = 0.0
    data["sample_mask"][2:] = 1.0
    reference = data["reference_policy_logprobs"]
    data["reference_policy_logprobs"] = torch.roll(reference, -1, -1)
    rows, tokens = normalizers(data)
    expected = dict.fromkeys(
        ("loss", "sft_loss", "preference_loss", "accuracy", "rewards_chosen_mean", "rewards_rejected_mean"),
        0.0,
    )
    pairs = float(rows) / 2
    for pair in range(1, 4):
        rewards, likelihoods = [], []
        for row in (2 * pair, 2 * pair + 1):
            places = [place for place in range(1, 7) if data["token_mask"][row, place]]
            reward = sum(float(data["current"][row, place] - reference[row, place]) for place in places)
            likelihood = -sum(float(data["current"][row, place]) for place in places)
            rewards.append(reward / max(len(places), 1) if average_preference else reward)
            likelihoods.append(likelihood / max(len(places), 1) if average_sft else likelihood)
        expected["preference_loss"] += math.log1p(math.exp(-0.4 * (rewards[0] - rewards[1]))) / pairs
        expected["sft_loss"] += (likelihoods[0] if sft_weight else 0.0) / pairs
        expected["accuracy"] += (rewards[0] > rewards[1]) / pairs
        expected["rewards_chosen_mean"] += rewards[0] / pairs
        expected["rewards_rejected_mean"] += rewards[1] / pairs
    expected["loss"] = 0.9 * expected["preference_loss"] + sft_weight * expected["sft_loss"]
    current = data["current"][:, 1:].clone().requires_grad_()
    _, metrics = DPOLossFn(config)(data, rows, tokens, next_token_logprobs=current)
    for name, value in expected.items():
        assert float(metrics[name]) == pytest.approx(value, rel=1e-7), name
    assert float(metrics["num_valid_samples"]) == 3
    loss_fn = DPOLossFn(config)
    assert torch.autograd.gradcheck(
        lambda logprobs: loss_fn(data, rows, tokens, next_token_logprobs=logprobs)[0], current, eps=1e-7
    )


def test_dpo_refuses_half_a_pair() -> None:
    data = policy_gradient_batch(16, rows=5)
    rows, tokens = normalizers(data)
    with pytest.raises(BatchError, match="even number"):
        DPOLossFn(DPO_CONFIG)(data, rows, tokens, next_token_logprobs=data["current"][:, 1:])


def test_attributes_of_the_contract() -> None:
    assert [loss.loss_type for loss in all_losses()] == [
        LossType.TOKEN_LEVEL,
        LossType.SEQUENCE_LEVEL,
        LossType.TOKEN_LEVEL,
        LossType.SEQUENCE_LEVEL,
        LossType.SEQUENCE_LEVEL,
        LossType.TOKEN_LEVEL,
    ]
    assert (
        LossType("token_level") is LossType.TOKEN_LEVEL
        and LossType("sequence_level") is LossType.SEQUENCE_LEVEL
    )
    assert all(
        loss.input_type is LossInputType.LOGPROB and isinstance(loss, LossFunction) for loss in all_losses()
    )


def test_one_token_rows_have_no_targets() -> None:
    data = {
        key: value[:, :1] if value.ndim > 1 else value for key, value in policy_gradient_batch(17).items()
    }
    rows, tokens = normalizers(data)
    for loss_fn in all_losses()[:3]:
        loss, _ = loss_fn(data, rows, tokens, next_token_logprobs=data["current"][:, 1:])
        assert float(loss) == 0.0


def test_masked_mean() -> None:
    values = torch.tensor([[1.0, math.nan, 3.0], [5.0, 7.0, math.inf]])
    mask = torch.tensor([[1.0, 0.0, 1.0], [1.0, 0.0, 0.0]])
    assert float(masked_mean(values, mask)) == pytest.approx(3.0)
    assert masked_mean(values, mask, dim=-1).tolist() == pytest.approx([2.0, 5.0])
    assert float(masked_mean(values, mask, global_normalization_factor=4)) == pytest.approx(9 / 4)
    assert float(masked_mean(values, torch.zeros_like(mask))) == 0.0
    assert float(masked_mean(values > 2, mask)) == pytest.approx(2 / 3)


def test_kl_estimate_is_never_negative_and_unbiased() -> None:
    generator = torch.Generator().manual_seed(18)
    policy, reference = (
        torch.log_softmax(torch.randn(11, generator=generator, dtype=torch.float64), 0) for _ in range(2)
    )
    estimate = calculate_kl_penalty_joschu2020(policy, reference)
    assert bool((estimate >= 0).all())
    expectation = float((policy.exp() * estimate).sum())
    assert expectation == pytest.approx(float((policy.exp() * (policy - reference)).sum()))
    assert torch.equal(calculate_kl_penalty_joschu2020(policy, policy), torch.zeros_like(policy))


def test_a_loss_that_is_written_for_logits_is_refused_by_its_signature() -> None:
    class ForLogits:
        def __call__(
            self, next_token_logits: Tensor, data: Any, global_valid_seqs: Tensor, global_valid_toks: Tensor
        ) -> Any: ...

    def with_further(
        data: Any, seqs: Tensor, toks: Tensor, vocab_parallel_rank: int, *, next_token_logprobs: Tensor
    ) -> Any: ...

    class SaysLogits(NLLLoss):
        input_type = SimpleNamespace(value="logit")  # type: ignore[assignment]

    for refused in (ForLogits(), with_further, SaysLogits(), "no loss"):
        with pytest.raises(ConfigError, match="next_token_logprobs"):
            check_loss(refused)
    with pytest.raises(
        ConfigError,
        match=r"loss_fn = ForLogits\(next_token_logits: .*not logits\. Fix: take next_token_logprobs",
    ):
        check_loss(ForLogits())

    def with_defaults(
        data: Any, seqs: Tensor, toks: Tensor, next_token_logprobs: Tensor, scale: float = 1.0
    ) -> Any: ...

    for taken in (NLLLoss(), with_defaults, lambda *arguments, **options: None):
        check_loss(taken)


def test_a_loss_that_returns_no_single_number_is_refused_by_its_name() -> None:
    loss, metrics = torch.tensor(2.0), {"loss": torch.tensor(2.0)}
    assert checked_result(NLLLoss(), (loss, metrics)) == (loss, metrics)
    for returned, what in (
        ((torch.ones(4, 7), {}), r"a loss \[4, 7\]\. Fix"),
        (loss, r"a loss \[\] without metrics"),
        ((2.0, {}), r"\(2\.0, \{\}\)\. Fix"),
        (None, "None without metrics"),
    ):
        with pytest.raises(ConfigError, match=f"loss_fn = NLLLoss: it returned {what}"):
            checked_result(NLLLoss(), returned)

    def of_tokens(data: Any, seqs: Tensor, toks: Tensor, *, next_token_logprobs: Tensor) -> Any:
        return -next_token_logprobs, {}

    micro_batch: Any = SimpleNamespace(micro_batch=SimpleNamespace(data={}))
    with pytest.raises(ConfigError, match=r"loss_fn = of_tokens: it returned a loss \[4, 7\]"):
        _loss_of(of_tokens, micro_batch, Normalizers(loss, loss), next_token_logprobs=torch.ones(4, 7))
