"""The family of policy gradients against its equations, worked out by hand one token at a time in float64:
values and gradients."""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from megarl.algorithms.loss_functions import ClippedPGLossFn, kl_of_tokens
from megarl.config.losses import ClippedPGLossConfig
from megarl.config.rules.losses import faults_of_loss
from megarl.errors import BatchError, ConfigError
from megarl.key import defaults_of
from tests.tables import read_table
from tests.tiers import sampled
from tests.unit.test_losses import PG_CONFIG, WITHOUT_DIVERGENCE, normalizers, policy_gradient_batch

TABLES = read_table("policy_gradients.yaml")

EPSILON = 1e-8
"""What ``masked_mean`` adds to a normaliser."""
SETTINGS: dict[str, tuple[Any, ...]] = {
    "sequence_level_importance_ratios": (False, True),
    "sequence_level_ratio_gradient": ("sequence", "token"),
    "use_cispo": (False, True),
    "token_level_loss": (True, False),
    "sequence_normalizer": (None, 9.0),
    "ratio_clip_c": (None, 1.3),
    "ratio_clip_min": (0.2, 1.0),
    "use_importance_sampling_correction": (False, True),
    "truncated_importance_sampling_type": (None, None, "tis", "icepop", "seq-mask-tis"),
    "truncated_importance_sampling_ratio": (None, 1.2, 1.6),
    "truncated_importance_sampling_ratio_min": (None, 0.8),
    "use_on_policy_kl_approximation": (False, True),
    "reference_policy_kl_penalty": (0.0, 0.3),
    "reference_policy_kl_type": ("k1", "k2", "k3"),
    "reference_policy_kl_gradient": ("exact", "pathwise"),
    "log_ratio_clamp_value": (20.0, 0.4, None),
    "kl_input_clamp_value": (20.0, 0.5, None),
    "kl_output_clamp_value": (10.0, 0.2, None),
    "force_on_policy_ratio": (False, True),
    "use_kl_in_reward": (False, True, True, True),
    "disable_ppo_ratio": (False, False, False, True),
    "entropy_coef": (0.0, 0.0, 0.2),
}


IN_REWARD = {
    "use_kl_in_reward": True,
    "reference_policy_kl_type": "k1",
    "use_on_policy_kl_approximation": False,
}
TIS = {"truncated_importance_sampling_type": "tis", "truncated_importance_sampling_ratio": 2.0}
SEQUENCES = {"sequence_level_importance_ratios": True, "token_level_loss": False}
CISPO = {"use_cispo": True, "ratio_clip_c": None}
FORCED = {"force_on_policy_ratio": True, "ratio_clip_c": None}
WITHOUT_RATIO = {"disable_ppo_ratio": True, "ratio_clip_c": None}
UNWEIGHTED = {"use_importance_sampling_correction": False}


def drawn_settings(seed: int, count: int) -> Iterator[dict[str, Any]]:
    """Settings that go together."""
    generator = random.Random(seed)
    found = 0
    while found < count:
        drawn = {name: generator.choice(values) for name, values in SETTINGS.items()}
        settings = {**defaults_of(ClippedPGLossConfig), **PG_CONFIG, **drawn}
        if not list(faults_of_loss(settings)):
            found += 1
            yield settings


class Sequence:
    """The tokens of one row that count, as plain numbers."""

    def __init__(self, data: dict[str, Tensor], row: int, settings: dict[str, Any]) -> None:
        self.places = [
            place for place in range(1, data["advantages"].shape[1]) if data["token_mask"][row, place]
        ]
        keys = ("advantages", "prev_logprobs", "generation_logprobs", "reference_policy_logprobs", "current")
        self.advantages, self.previous, self.generation, self.reference, self.current = (
            [float(data[key][row, place]) for place in self.places] for key in keys
        )
        if settings["force_on_policy_ratio"]:
            self.previous = self.current
        self.length = len(self.places)


def slow_value_and_gradient(
    data: dict[str, Tensor], settings: dict[str, Any], rows: float, tokens: float
) -> tuple[float, Tensor]:
    """The loss and its derivatives by each of the log-probabilities and entropies [2, B, S-1]."""
    value, gradient = 0.0, torch.zeros_like(scores_of(data))
    for row in range(gradient.shape[1]):
        sequence = Sequence(data, row, settings)
        if not data["sample_mask"][row] or not sequence.length:
            continue
        share = share_of_token(sequence.length, settings, rows, tokens)
        for terms, weight in (
            (policy_terms(sequence, settings), 1.0),
            (divergence_terms(sequence, settings), penalty_of(settings)),
        ):
            for place, (term, slope) in zip(sequence.places, terms, strict=True):
                value += share * weight * term
                gradient[0, row, place - 1] += share * weight * slope
        for place in sequence.places:
            value -= share * settings["entropy_coef"] * float(data["entropies"][row, place])
            gradient[1, row, place - 1] = -share * settings["entropy_coef"]
    return value, gradient


def scores_of(data: dict[str, Tensor]) -> Tensor:
    """[2, B, S-1]: log-probabilities and entropies."""
    return torch.stack([data["current"][:, 1:], data["entropies"][:, 1:]])


def given_to(loss_fn: Any, scores: Tensor) -> dict[str, Tensor]:
    """The arguments that the engine passes, of ``scores_of``; entropies only to a loss that asks for them,
    and of three further tokens some log-probabilities that follow from both."""
    given = {"next_token_logprobs": scores[0]}
    if getattr(loss_fn, "needs_entropies", False):
        given["next_token_entropies"] = scores[1]
    if getattr(loss_fn, "scored_tokens", None) is not None:
        logits = torch.stack(
            [scores[0], scores[1], scores[0] * scores[1], torch.zeros_like(scores[0])], dim=-1
        )
        given["scored_logprobs"] = logits.log_softmax(-1)[..., :3]
    return given


def penalty_of(settings: dict[str, Any]) -> float:
    return 0.0 if settings["use_kl_in_reward"] else float(settings["reference_policy_kl_penalty"])


def share_of_token(length: int, settings: dict[str, Any], rows: float, tokens: float) -> float:
    if settings["token_level_loss"]:
        return 1 / (tokens + EPSILON)
    return 1 / ((settings["sequence_normalizer"] or length) + EPSILON) / (rows + EPSILON)


def policy_terms(sequence: Sequence, settings: dict[str, Any]) -> list[tuple[float, float]]:
    """Value of each token's term, and the derivative of the sum of all of them by the token's
    log-probability."""
    count, bound = sequence.length, bound_of(settings, "log_ratio_clamp_value")
    logarithms = [now - before for now, before in zip(sequence.current, sequence.previous, strict=True)]
    corrections = [
        before - drawn for before, drawn in zip(sequence.previous, sequence.generation, strict=True)
    ]
    of_sequence = settings["sequence_level_importance_ratios"]
    if of_sequence:
        logarithms, corrections = ([sum(values) / count] * count for values in (logarithms, corrections))
    weights = [
        math.exp(value) if settings["use_importance_sampling_correction"] else 1.0 for value in corrections
    ]
    weights = bounded_weights(weights, sequence, settings)
    values, by_logarithm, direct = [], [], []
    for advantage, logarithm, weight, current in zip(
        sequence.advantages, logarithms, weights, sequence.current, strict=True
    ):
        ratio = math.exp(max(-bound, min(bound, logarithm)))
        moves = ratio if abs(logarithm) <= bound else 0.0
        if settings["disable_ppo_ratio"]:
            value, slope = -advantage * current, -advantage
            if (
                settings["ratio_clip_c"] is not None
                and advantage < 0
                and value > -advantage * settings["ratio_clip_c"]
            ):
                value, slope = -advantage * settings["ratio_clip_c"], 0.0
            values.append(weight * value), by_logarithm.append(0.0), direct.append(weight * slope)
            continue
        clipped = max(1 - settings["ratio_clip_min"], min(1 + settings["ratio_clip_max"], ratio))
        if settings["use_cispo"]:
            (
                values.append(weight * -advantage * clipped * current),
                by_logarithm.append(0.0),
                direct.append(weight * -advantage * clipped),
            )
            continue
        value, slope = -advantage * ratio, -advantage * moves
        if -advantage * clipped > value:
            value, slope = -advantage * clipped, 0.0
        if (
            settings["ratio_clip_c"] is not None
            and advantage < 0
            and value > -advantage * settings["ratio_clip_c"]
        ):
            value, slope = -advantage * settings["ratio_clip_c"], 0.0
        values.append(weight * value), by_logarithm.append(weight * slope), direct.append(0.0)
    if of_sequence and settings["sequence_level_ratio_gradient"] == "sequence":
        by_logarithm = [sum(by_logarithm) / count] * count
    return [(value, slope + own) for value, slope, own in zip(values, by_logarithm, direct, strict=True)]


def bound_of(settings: dict[str, Any], key: str) -> float:
    return math.inf if settings[key] is None else float(settings[key])


def bounded_weights(weights: list[float], sequence: Sequence, settings: dict[str, Any]) -> list[float]:
    kind, high = (
        settings["truncated_importance_sampling_type"],
        settings["truncated_importance_sampling_ratio"],
    )
    low = settings["truncated_importance_sampling_ratio_min"] or 0.0
    if kind == "tis":
        return [min(weight, high) for weight in weights]
    if kind == "icepop":
        return [weight if low <= weight <= high else 0.0 for weight in weights]
    if kind == "seq-mask-tis":
        product = math.prod(
            math.exp(before - drawn)
            for before, drawn in zip(sequence.previous, sequence.generation, strict=True)
        )
        return weights if low <= product ** (1 / sequence.length) <= high else [0.0] * sequence.length
    return weights


def divergence_terms(sequence: Sequence, settings: dict[str, Any]) -> list[tuple[float, float]]:
    kind, found = settings["reference_policy_kl_type"], []
    low, high = bound_of(settings, "kl_input_clamp_value"), bound_of(settings, "kl_output_clamp_value")
    for current, reference, drawn in zip(
        sequence.current, sequence.reference, sequence.generation, strict=True
    ):
        weight = math.exp(current - drawn) if settings["use_on_policy_kl_approximation"] else 1.0
        difference = max(-low, min(low, reference - current))
        estimate = {"k1": -difference, "k2": difference**2 / 2, "k3": math.exp(difference) - difference - 1}[
            kind
        ]
        # the gradient of sum p log(p / q) is the expectation of log(p / q) times that of log p
        slope = -difference
        if settings["reference_policy_kl_gradient"] == "pathwise":
            slope = max(1 - math.exp(difference), -(high + max(difference, 0.0)))
        found.append((weight * max(-high, min(high, estimate)), weight * slope))
    return found


def value_and_gradient(
    data: dict[str, Tensor], settings: dict[str, Any]
) -> tuple[float, Tensor, dict[str, Tensor]]:
    scores, loss_fn = scores_of(data).requires_grad_(), ClippedPGLossFn(settings)
    loss, metrics = loss_fn(data, *normalizers(data), **given_to(loss_fn, scores))
    (gradient,) = torch.autograd.grad(loss, scores)
    return float(loss.detach()), gradient, metrics


@sampled(1)
@pytest.mark.parametrize("seed", range(4))
def test_values_and_gradients_are_those_of_the_equations(seed: int) -> None:
    used: set[tuple[str, Any]] = set()
    for number, settings in enumerate(drawn_settings(seed, 200)):
        data = policy_gradient_batch(1000 * seed + number)
        if number % 2:
            # past every clamp, where no clamp is another thing; k3 of +22 has a gradient that is a difference
            # of numbers of 1e9
            data["prev_logprobs"][0] -= 21
            data["reference_policy_logprobs"][2] -= 22
        rows, tokens = normalizers(data)
        value, gradient, _ = value_and_gradient(data, settings)
        slow_value, slow_gradient = slow_value_and_gradient(data, settings, float(rows), float(tokens))
        assert value == pytest.approx(slow_value, rel=1e-12, abs=1e-12), (seed, number, settings)
        torch.testing.assert_close(
            gradient, slow_gradient, rtol=1e-12, atol=1e-12, msg=lambda text, s=settings: f"{text}\n{s}"
        )
        used |= {(name, settings[name]) for name in SETTINGS}
    assert used >= {(name, value) for name, values in SETTINGS.items() for value in values}


def test_gradients_of_sequence_and_token_differ_only_where_advantages_do_within_a_sequence() -> None:
    settings = PG_CONFIG | SEQUENCES | WITHOUT_DIVERGENCE
    data = policy_gradient_batch(3)
    of_token = {**settings, "sequence_level_ratio_gradient": "token"}
    values, gradients = zip(
        *(value_and_gradient(data, each)[:2] for each in (settings, of_token)), strict=True
    )
    assert values[0] == values[1]
    assert not torch.allclose(gradients[0], gradients[1])
    data["advantages"] = data["advantages"][:, :1].expand_as(data["advantages"])
    gradients = [value_and_gradient(data, each)[1] for each in (settings, of_token)]
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-12, atol=1e-14)


def test_a_sequence_in_two_batches_is_the_sum_over_both() -> None:
    """Whatever is of a whole sequence is worked out within it: rows may be dealt to any number of batches."""
    for settings in drawn_settings(11, 30):
        data = policy_gradient_batch(5, rows=6)
        whole, gradient, metrics = value_and_gradient(data, settings)
        loss_fn, total, gradients = ClippedPGLossFn(settings), 0.0, []
        for rows in (slice(0, 1), slice(1, 4), slice(4, 6)):
            part = {key: value[rows] for key, value in data.items()}
            scores = scores_of(part).requires_grad_()
            loss, _ = loss_fn(part, *normalizers(data), **given_to(loss_fn, scores))
            total += float(loss.detach())
            gradients.append(torch.autograd.grad(loss, scores)[0])
        assert total == pytest.approx(whole, rel=1e-12, abs=1e-14)
        torch.testing.assert_close(torch.cat(gradients, dim=1), gradient, rtol=1e-12, atol=1e-14)
        assert math.isfinite(float(metrics["probs_ratio"]))


def test_padding_changes_nothing() -> None:
    for settings in drawn_settings(12, 30):
        data = policy_gradient_batch(6)
        value, gradient, metrics = value_and_gradient(data, settings)
        wider = {
            key: tensor
            if tensor.ndim == 1
            else torch.cat([tensor, torch.full_like(tensor[:, :3], 0 if "mask" in key else 50)], dim=1)
            for key, tensor in data.items()
        }
        wide_value, wide_gradient, wide_metrics = value_and_gradient(wider, settings)
        assert wide_value == pytest.approx(value, rel=1e-12)
        torch.testing.assert_close(wide_gradient[..., :-3], gradient, rtol=1e-12, atol=1e-14)
        assert not wide_gradient[..., -3:].any()
        for name, number in metrics.items():
            assert float(wide_metrics[name]) == pytest.approx(float(number), rel=1e-12), name


def test_the_metric_of_entropies_is_their_mean_over_tokens() -> None:
    data = policy_gradient_batch(7)
    counts = (data["token_mask"] * data["sample_mask"][:, None])[:, 1:]
    for settings in (PG_CONFIG, PG_CONFIG | {"token_level_loss": False, "sequence_normalizer": 9.0}):
        _, _, metrics = value_and_gradient(data, settings | {"entropy_coef": 0.1})
        assert float(metrics["entropy"]) == pytest.approx(
            float((data["entropies"][:, 1:] * counts).sum() / counts.sum()), rel=1e-7
        )
        assert "entropy" not in value_and_gradient(data, settings)[2]


@pytest.mark.parametrize(
    "given", [{}, {"next_token_entropies": torch.zeros(6, 7)}], ids=["none", "another shape"]
)
def test_a_bonus_without_its_entropies_is_refused(given: dict[str, Tensor]) -> None:
    data = policy_gradient_batch(7)
    loss_fn = ClippedPGLossFn(PG_CONFIG | {"entropy_coef": 0.1})  # type: ignore[arg-type]
    with pytest.raises(BatchError, match=r"next_token_entropies has the shape .*expected \[6, 6\]\. Fix"):
        loss_fn(data, *normalizers(data), next_token_logprobs=data["current"][:, 1:], **given)


def test_the_divergence_that_is_taken_from_rewards() -> None:
    data = policy_gradient_batch(2)
    settings = PG_CONFIG | {
        "use_kl_in_reward": True,
        "reference_policy_kl_type": "k1",
        "use_on_policy_kl_approximation": False,
    }
    found = kl_of_tokens(settings | {"kl_output_clamp_value": 0.3}, data)  # type: ignore[arg-type]
    counts = data["token_mask"] * data["sample_mask"][:, None]
    expected = (data["prev_logprobs"] - data["reference_policy_logprobs"]).clamp(-0.3, 0.3) * counts
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize(("kind", "left_out"), [("tis", 0.0), ("icepop", 1 / 4), ("seq-mask-tis", 2 / 4)])
def test_the_share_of_weights_out_of_bounds(kind: str, left_out: float) -> None:
    """One token of two with the weight 8 (the geometric mean of its sequence is 2.83), and a sequence with
    none."""
    data = policy_gradient_batch(1, rows=2, length=3)
    data |= {name: torch.ones_like(data[name]) for name in ("token_mask", "sample_mask", "advantages")}
    data["prev_logprobs"] = data["current"].clone()
    data["generation_logprobs"] = data["prev_logprobs"].clone()
    data["generation_logprobs"][0, 1] -= math.log(8)
    settings = PG_CONFIG | WITHOUT_DIVERGENCE | {"truncated_importance_sampling_type": kind}
    loss, _, metrics = value_and_gradient(data, settings | {"truncated_importance_sampling_ratio": 2.0})
    changed = 1 / 4 if kind == "tis" else left_out
    assert float(metrics["is_oob_ratio"]) == pytest.approx(changed)
    weights = {"tis": 2 + 3, "icepop": 0 + 3, "seq-mask-tis": 2}[kind]
    assert loss == pytest.approx(-weights / 4)


@pytest.mark.parametrize(
    ("change", "key", "word"),
    TABLES["what does not go together is refused with a reason"],
)
def test_what_does_not_go_together_is_refused_with_a_reason(
    change: dict[str, Any], key: str, word: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        ClippedPGLossFn(PG_CONFIG | change)  # type: ignore[arg-type]
    (violation,) = caught.value.violations
    assert violation.key == f"loss_fn.{key}" and word in violation.bound and violation.fix


@pytest.mark.parametrize(
    ("settings", "key"),
    TABLES["what is refused would do nothing"],
)
def test_what_is_refused_would_do_nothing(
    settings: dict[str, Any], key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megarl.algorithms.loss_functions.faults_of_loss", lambda loss: [])
    off = {"ratio_clip_c": None, **dict.fromkeys(FLAGS, False)}
    without = {**settings, key: {**defaults_of(ClippedPGLossConfig), **off}[key]}
    for seed in range(5):
        data = as_probabilities(policy_gradient_batch(seed))
        gradients = [value_and_gradient(data, PG_CONFIG | each)[1] for each in (settings, without)]
        torch.testing.assert_close(*gradients, rtol=1e-14, atol=1e-15)


FLAGS = [name for name, values in SETTINGS.items() if values[0] is False]


def as_probabilities(data: dict[str, Tensor]) -> dict[str, Tensor]:
    """With log-probabilities that are some."""
    return data | {
        name: data[name].clamp(max=-0.01) for name in data if "logprobs" in name or name == "current"
    }


def test_every_setting_that_is_accepted_does_something() -> None:
    """Without it value, gradient or the divergence of the rewards differ on some batch."""
    off = {
        **{name: values[0] for name, values in SETTINGS.items()},
        "reference_policy_kl_type": "k3",
        "token_level_loss": False,
    }
    checked: set[str] = set()
    for settings in drawn_settings(21, 80):
        for key in SETTINGS:
            without = {**settings, key: off[key]}
            if without == settings or list(faults_of_loss(without)) or _is_out_of_reach(settings, key):
                continue
            checked.add(key)
            assert any(_outcome(settings, seed) != _outcome(without, seed) for seed in range(20)), (
                key,
                settings,
            )
    # these two are refused without each other
    assert checked >= SETTINGS.keys() - {
        "truncated_importance_sampling_type",
        "truncated_importance_sampling_ratio",
    }


def _is_out_of_reach(settings: dict[str, Any], key: str) -> bool:
    """Whether the numbers, not the kinds of settings, leave nothing to do, or a key that has to be there."""
    if key.endswith("_clamp_value") and settings[key] is None:
        return True  # all are within the clamp that is the default
    if key == "log_ratio_clamp_value":
        return bool(settings["use_cispo"])  # its bounds are narrower
    if {settings["kl_input_clamp_value"], settings["kl_output_clamp_value"]} == {0.5, 0.2}:
        # k3 of 0.5 is 0.15
        narrower = (
            "kl_output_clamp_value"
            if settings["reference_policy_kl_type"] == "k1"
            else "kl_input_clamp_value"
        )
        if key in {"kl_input_clamp_value", "kl_output_clamp_value"} - {narrower}:
            return True
    return key == "ratio_clip_min" and (settings["disable_ppo_ratio"] or settings["force_on_policy_ratio"])


@functools.cache
def _batch(seed: int) -> dict[str, Tensor]:
    return as_probabilities(policy_gradient_batch(seed))


def _outcome(settings: dict[str, Any], seed: int) -> list[Any]:
    value, gradient, _ = value_and_gradient(_batch(seed), settings)
    of_rewards = gradient
    if settings["use_kl_in_reward"]:
        of_rewards = settings["reference_policy_kl_penalty"] * kl_of_tokens(settings, _batch(seed))
    return [value, gradient.tolist(), of_rewards.tolist()]
