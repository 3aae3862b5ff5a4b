"""What the functions of NeMo-RL, verl, slime and OpenRLHF give for one fixed batch, as numbers: worked out
from their equations by a program of its own, in plain Python, and written down here. What megarl does
otherwise on purpose is said where it is turned into the same.

Files: NeMo-RL ``nemo_rl/algorithms/advantage_estimator.py``, verl ``verl/trainer/ppo/core_algos.py``, slime
``slime/utils/ppo_utils.py``, OpenRLHF ``openrlhf/models/loss.py``, as of 2026. TRL's are in
``test_losses_of_trl.py``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from megarl.algorithms.advantages import (
    estimated_advantages,
    generalized_advantages,
    rewards_of_tokens,
    whitened,
)
from megarl.algorithms.distillation import Distillation
from megarl.algorithms.distillation_loss import DistillationLossFn
from megarl.algorithms.loss_functions import ClippedPGLossFn
from megarl.algorithms.value_losses import ValueLoss
from tests.unit.test_advantages import settings_of

LENGTHS = [5, 2, 3, 1, 4, 3]
TOKENS = sum(LENGTHS)
WIDTH = 1 + max(LENGTHS)
GROUPS = torch.tensor([[0], [0], [0], [1], [1], [1]])
REWARDS = torch.tensor([1.0, 0.0, 0.5, 2.0, -1.0, 0.25], dtype=torch.float64)
OTHER_REWARDS = torch.tensor([10.0, 30.0, 20.0, 0.0, 5.0, 40.0], dtype=torch.float64)
BY_ROW = torch.tensor([0.75, -0.75, 0.0, 2.375, -2.125, -0.25], dtype=torch.float64)
"""Advantages of the losses: those of RLOO."""


def column(entry: Callable[[int, int], float]) -> Tensor:
    """Float64 [6, WIDTH]; column 0 is the prompt."""
    return torch.tensor(
        [[entry(row, place) for place in range(WIDTH)] for row in range(len(LENGTHS))], dtype=torch.float64
    )


MASK = column(lambda row, place: float(1 <= place <= LENGTHS[row]))
CURRENT = column(lambda row, place: -1 - ((3 * row + 5 * place) % 7) / 8)
PREVIOUS = CURRENT + column(lambda row, place: ((2 * row + 3 * place) % 5 - 2) / 10)
GENERATION = PREVIOUS + column(lambda row, place: ((row + 2 * place) % 4 - 1.5) / 10)
REFERENCE = CURRENT + column(lambda row, place: ((4 * row + place) % 6 - 2.5) / 8)
TEACHER = CURRENT + column(lambda row, place: ((row + 3 * place) % 5 - 2) / 5)
OLD_VALUES = column(lambda row, place: ((row + place) % 4) / 4)
VALUES = OLD_VALUES + column(lambda row, place: ((2 * row + place) % 5 - 2) / 8)
SAMPLES = {
    "prompt_ids": GROUPS,
    "reward": REWARDS,
    "reward/one": REWARDS,
    "reward/other": OTHER_REWARDS,
    "token_mask": MASK,
    "sample_mask": torch.ones(6, dtype=torch.float64),
}
ROWS = SAMPLES["sample_mask"].sum(), MASK.sum()


def close(found: Tensor, expected: list[float], rel: float = 1e-11) -> None:
    assert found.flatten().tolist() == pytest.approx(expected, rel=rel, abs=1e-11)


def advantages(
    name: str, minus_baseline: bool = False, penalties: Tensor | None = None, **settings: Any
) -> Tensor:
    given = settings_of(name, minus_baseline, **settings)
    return estimated_advantages(given, SAMPLES, SAMPLES["sample_mask"], penalties, {"one": 1.0, "other": 0.5})


def gae(mask: Tensor) -> tuple[Tensor, Tensor]:
    rewards = rewards_of_tokens(REWARDS, mask)
    return generalized_advantages(rewards, OLD_VALUES, mask, discount=0.9, gae_lambda=0.8)


def test_generalized_advantages() -> None:
    """verl's ``compute_gae_advantage_return``, NeMo-RL's estimator: an observation (token 3 of answer 0) is
    stepped over. slime's ``get_advantages_and_returns`` for answer 2, which has none."""
    mask = MASK.clone()
    mask[0, 3] = 0.0
    found, returns = gae(mask)
    close(found[0, [1, 2, 4, 5]], [0.236576, 0.0508, 0.765, 0.75])
    close(returns[0, [1, 2, 4, 5]], [0.486576, 0.5508, 0.765, 1.0])
    close(found[2, 1:4], [-0.4584, 0.405, 0.25])
    close(returns[2, 1:4], [0.2916, 0.405, 0.5])


def test_generalized_advantages_whitened() -> None:
    """verl divides by the deviation with n - 1 tokens, NeMo-RL and megarl with n."""
    found = whitened(gae(MASK)[0], MASK) * math.sqrt((TOKENS - 1) / TOKENS)
    close(found[0, 1:5], [0.397730648615, 0.157736377313, -0.131996248822, 1.07852910095])


def test_value_loss() -> None:
    """OpenRLHF's ``ValueLoss`` with ``clip_eps=0.2``, the clip of OpenAI's PPO2. The value of a token's state
    is said a token before."""
    data: Any = {**SAMPLES, "returns": torch.ones_like(MASK), "prev_values": OLD_VALUES}
    loss, _ = ValueLoss(0.2)(data, *ROWS, values=VALUES.roll(-1, dims=1))
    assert float(loss) == pytest.approx(0.2532465277777778, rel=1e-7)


def test_rloo() -> None:
    """verl's ``compute_rloo_outcome_advantage``."""
    close(advantages("rloo"), BY_ROW.tolist())


def test_grpo() -> None:
    """verl's ``compute_grpo_outcome_advantage``: the sample deviation, plus 1e-6, which megarl has not."""
    found = advantages("grpo", use_leave_one_out_baseline=False, std="sample")
    close(
        found,
        [0.999998000004, -0.999998000004, 0.0, 1.05070170361, -0.940101524283, -0.110600179327],
        rel=3e-6,
    )


def test_gdpo() -> None:
    """NeMo-RL's estimator on top of verl's group deviation, likewise; it whitens the answers by n - 1, megarl
    by n, and verl tokens."""
    found = advantages("gdpo", use_leave_one_out_baseline=False, std="sample") * math.sqrt(5 / 6)
    expected = [0.695875238035, -0.695875238035, 0.0, 0.983384268125, -1.62768253411, 0.644298265982]
    assert found.flatten().tolist() == pytest.approx(expected, rel=3e-6, abs=1e-9)


def test_reinforce_plus_plus() -> None:
    """slime's ``get_reinforce_plus_plus_returns`` with k1, gamma 1, coefficient 0.1, and the whitening of
    NeMo-RL: by n. NeMo-RL itself takes from each token its own divergence alone, and not that of the later
    ones."""
    found = advantages("reinforce_plus_plus", penalties=0.1 * (PREVIOUS - REFERENCE) * MASK)
    answer_0 = [0.848793932611, 0.882735851678, 0.878308644843, 0.894541736571, 0.872405702396]
    close(torch.cat([found[0, 1:], found[1, 1:3]]), [*answer_0, -0.356882062074, -0.41738722215])


def test_reinforce_plus_plus_baseline() -> None:
    """NeMo-RL's with ``minus_baseline``, and verl's, which divides by the deviation with n - 1 tokens."""
    found = advantages("reinforce_plus_plus", minus_baseline=True)[:, 1]
    close(
        found,
        [0.827707010584, -0.405291018976, 0.211207995804, 2.16345487594, -1.53553921274, 0.00570832421092],
    )
    of_verl = [
        0.804386626957,
        -0.39387207251,
        0.205257277223,
        2.10250021805,
        -1.49227588035,
        0.00554749397901,
    ]
    close(found * math.sqrt((TOKENS - 1) / TOKENS), of_verl)


WEIGHTED = {"use_importance_sampling_correction": True}
SEQUENCES = {
    "sequence_level_importance_ratios": True,
    "token_level_loss": False,
    "ratio_clip_min": 0.05,
    "ratio_clip_max": 0.08,
}
# the loss that each gives, by the settings for it
LOSSES: dict[str, tuple[dict[str, Any], float]] = {
    "slime's compute_policy_loss, eps_clip 0.2 and eps_clip_high 0.28": ({}, 0.29880804959243285),
    "slime's with eps_clip_c 1.1, as verl's clip_ratio_c": ({"ratio_clip_c": 1.1}, 0.27873505736242454),
    "verl's compute_policy_loss_gspo, seq-mean-token-mean": (SEQUENCES, 0.08504373580603701),
    # without a lower bound, as in the paper: clip_ratio_low 1
    "verl's compute_policy_loss_cispo": (
        {"use_cispo": True, "ratio_clip_min": 1.0, "ratio_clip_max": 0.05},
        -0.438625310209765,
    ),
    # with tis_clip_low 0; OpenRLHF's tis has a lower bound too, which megarl's has not
    "slime's tis, as NeMo-RL's": (
        {**WEIGHTED, "truncated_importance_sampling_type": "tis", "truncated_importance_sampling_ratio": 1.1},
        0.294743175323829,
    ),
    "NeMo-RL's and OpenRLHF's icepop": (
        {
            **WEIGHTED,
            "truncated_importance_sampling_type": "icepop",
            "truncated_importance_sampling_ratio": 1.1,
            "truncated_importance_sampling_ratio_min": 0.9,
        },
        0.06188919668014459,
    ),
    "NeMo-RL's and OpenRLHF's seq-mask-tis": (
        {
            **WEIGHTED,
            "truncated_importance_sampling_type": "seq-mask-tis",
            "truncated_importance_sampling_ratio": 1.04,
            "truncated_importance_sampling_ratio_min": 0.97,
        },
        -0.2186334442350321,
    ),
}
DEFAULTS = {
    "reference_policy_kl_penalty": 0.0,
    "ratio_clip_min": 0.2,
    "ratio_clip_max": 0.28,
    "ratio_clip_c": None,
    "use_on_policy_kl_approximation": False,
    "use_importance_sampling_correction": False,
    "token_level_loss": True,
}


def policy_loss(by_token: Tensor, **settings: Any) -> tuple[float, dict[str, Tensor]]:
    data: Any = {
        **SAMPLES,
        "advantages": by_token,
        "prev_logprobs": PREVIOUS,
        "generation_logprobs": GENERATION,
        "reference_policy_logprobs": REFERENCE,
    }
    loss, metrics = ClippedPGLossFn({**DEFAULTS, **settings})(data, *ROWS, next_token_logprobs=CURRENT[:, 1:])  # type: ignore[typeddict-item]
    return float(loss), metrics


@pytest.mark.parametrize("name", LOSSES)
def test_losses_of_policies(name: str) -> None:
    settings, expected = LOSSES[name]
    assert policy_loss(BY_ROW[:, None].expand_as(MASK), **settings)[0] == pytest.approx(expected, rel=1e-7)


def test_the_weight_of_a_sequence() -> None:
    """slime's ``compute_gspo_kl``: the ratio of an answer is exp(mean of current - previous), here of each
    answer as the only one."""
    expected = [1.0, 1.05127109638, 1.03389511351, 0.818730753078, 1.02531512052, 0.935506985032]
    for row, weight in enumerate(expected):
        mask = torch.zeros_like(MASK)
        mask[row] = MASK[row]
        data: Any = {
            **SAMPLES,
            "token_mask": mask,
            "advantages": MASK,
            "prev_logprobs": PREVIOUS,
            "generation_logprobs": GENERATION,
        }
        settings: Any = {**DEFAULTS, **SEQUENCES}
        _, metrics = ClippedPGLossFn(settings)(data, ROWS[0], mask.sum(), next_token_logprobs=CURRENT[:, 1:])
        assert float(metrics["probs_ratio"]) == pytest.approx(weight, rel=1e-7)


@pytest.mark.parametrize(("kind", "expected"), [("k3", 0.026417142719274325), ("k2", 0.025390625)])
def test_divergences(kind: str, expected: float) -> None:
    """slime's ``compute_approx_kl`` (``low_var_kl``, ``k2``), its mean over tokens."""
    _, metrics = policy_loss(0 * MASK, reference_policy_kl_penalty=0.1, reference_policy_kl_type=kind)
    assert float(metrics["kl_penalty"]) == pytest.approx(expected, rel=1e-7)


def test_on_policy_distillation() -> None:
    """NeMo-RL's ``OPDAdvantageEstimator`` and slime's on-policy distillation: log p_teacher - log p_student
    of each token."""
    algorithm: Any = SimpleNamespace(config={"advantage_clip_low": None, "advantage_clip_high": None})
    found, _ = Distillation.advantages(algorithm, {**SAMPLES, "prev_logprobs": PREVIOUS}, TEACHER)  # type: ignore[arg-type]
    close(torch.cat([found[0, 1:], found[1, 1:3]]), [0.1, -0.1, 0.2, 0.0, -0.2, 0.6, -0.1])
    assert policy_loss(found)[0] == pytest.approx(0.0003111567074116446, rel=1e-7)


@pytest.mark.parametrize(
    ("kind", "expected"), [("reverse", 0.39011287975244846), ("forward", 0.3981120021886401)]
)
def test_the_divergence_over_a_vocabulary(kind: Any, expected: float) -> None:
    """NeMo-RL's ``DistillationLossFn`` with all tokens for the teacher's most likely ones: KL(policy ||
    teacher), and the other one."""
    teacher = torch.tensor([[0.1, 0.2, 0.3, 0.4], [0.25, 0.25, 0.3, 0.2]], dtype=torch.float64).log()
    policy = torch.tensor([[0.4, 0.3, 0.2, 0.1], [0.1, 0.6, 0.1, 0.2]], dtype=torch.float64).log()
    data: Any = {
        "teacher_topk_logits": torch.nn.functional.pad(teacher, (0, 0, 0, 1))[None],
        "teacher_topk_indices": torch.arange(4).expand(1, 3, 4),
        "token_mask": torch.tensor([[0.0, 1.0, 1.0]]),
        "sample_mask": torch.ones(1),
    }
    for outside in ("rest", "renormalize"):
        loss_fn = DistillationLossFn({"kl_type": kind, "outside_topk": outside})  # type: ignore[typeddict-item]
        loss, _ = loss_fn(data, torch.tensor(1.0), torch.tensor(2.0), policy[None, :, 0], policy[None])
        assert float(loss) == pytest.approx(expected, rel=1e-7)
