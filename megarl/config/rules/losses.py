"""Rules on the settings of losses: combinations without effect or without meaning."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from megarl.config.asynchrony import NAME as ASYNC
from megarl.config.losses import SECTION, ClippedPGLossConfig, DPOLossConfig
from megarl.config.rules.table import Row, defaults
from megarl.config.rules.view import Rule, View, apply_rules
from megarl.errors import Violation
from megarl.key import keys_of

# Settings at their defaults: where nothing reads them, any other value is refused.
_CLAMP = defaults(SECTION, ClippedPGLossConfig, "log_ratio_clamp_value")
_DIVERGENCE = defaults(
    SECTION,
    ClippedPGLossConfig,
    "reference_policy_kl_type",
    "reference_policy_kl_gradient",
    "kl_input_clamp_value",
    "kl_output_clamp_value",
)
# Conditions list None next to False: a loss constructed in a program may lack the key, which then counts as
# off.
_ROWS = (
    Row(
        "ratios",
        {"loss_fn.sequence_level_importance_ratios": False, "loss_fn.use_cispo": False},
        {"loss_fn.disable_ppo_ratio": True},
        "disable_ppo_ratio is true, and without a ratio it would do nothing",
        "switch one of the two off",
    ),
    Row(
        "ratios",
        {"loss_fn.ratio_clip_c": None},
        {"loss_fn.disable_ppo_ratio": True},
        (
            "disable_ppo_ratio is true: the objective uses the log-probability in place of the "
            "ratio, and never reaches this bound"
        ),
        "write null",
    ),
    Row(
        "ratios",
        _CLAMP,
        {"loss_fn.disable_ppo_ratio": True},
        "disable_ppo_ratio is true, and there is no ratio to clamp, so nothing reads it",
        "remove it",
    ),
    Row(
        "ratios",
        {"loss_fn.sequence_level_ratio_gradient": "sequence"},
        {"loss_fn.sequence_level_importance_ratios": (False, None)},
        "it selects the gradient of a sequence's ratio, and sequence_level_importance_ratios is false",
        "write sequence_level_importance_ratios: true",
    ),
    Row(
        "ratios",
        {"loss_fn.token_level_loss": False},
        {"loss_fn.sequence_level_importance_ratios": True},
        "sequence_level_importance_ratios is true: the objective counts once per sequence, not "
        "once per token (GSPO, arXiv 2507.18071, equation 5)",
        "write token_level_loss: false, with sequence_normalizer: 1 to count it once per token "
        "(LUSPO), or sequence_level_importance_ratios: false",
    ),
    Row(
        "forced",
        {"loss_fn.use_cispo": False},
        {"loss_fn.force_on_policy_ratio": True},
        (
            "force_on_policy_ratio is true: the ratio is 1, so CISPO's weight is 1 and the "
            "gradient is the same without it"
        ),
        "switch one of the two off",
    ),
    Row(
        "forced",
        {"loss_fn.ratio_clip_c": None},
        {"loss_fn.force_on_policy_ratio": True},
        "force_on_policy_ratio is true: the ratio is 1 and never reaches this bound",
        "write null",
    ),
    Row(
        "forced",
        {"loss_fn.disable_ppo_ratio": False},
        {"loss_fn.force_on_policy_ratio": True},
        "force_on_policy_ratio is true: the ratio is 1, and the gradient is the same without it",
        "switch one of the two off",
    ),
    Row(
        "forced",
        {"loss_fn.sequence_level_ratio_gradient": "sequence"},
        {
            "loss_fn.force_on_policy_ratio": True,
            "loss_fn.disable_ppo_ratio": (False, None),
            "loss_fn.use_importance_sampling_correction": False,
        },
        (
            "force_on_policy_ratio is true: the ratios of sequences and tokens are all 1, so the "
            "gradient is that of token-level ratios"
        ),
        "write sequence_level_importance_ratios: false, and remove this",
    ),
    Row(
        "forced",
        _CLAMP,
        {"loss_fn.force_on_policy_ratio": True, "loss_fn.disable_ppo_ratio": (False, None)},
        "force_on_policy_ratio is true: the ratio is 1 and its logarithm 0, so nothing reads it",
        "remove it",
    ),
    Row(
        "cispo",
        {"loss_fn.sequence_level_importance_ratios": False},
        {"loss_fn.use_cispo": True},
        (
            "use_cispo is true: its weights are the ratios of tokens (arXiv 2506.13585, equation "
            "4); it is not defined for sequences"
        ),
        "switch one of the two off",
    ),
    Row(
        "cispo",
        {"loss_fn.ratio_clip_c": None},
        {"loss_fn.use_cispo": True},
        "use_cispo is true: ratio_clip_max already bounds its weights for every advantage",
        "write null",
    ),
    Row(
        "truncation",
        {
            "loss_fn.truncated_importance_sampling_ratio": None,
            "loss_fn.truncated_importance_sampling_ratio_min": None,
        },
        {"loss_fn.truncated_importance_sampling_type": None},
        "truncated_importance_sampling_type is null, and nothing reads it",
        "write truncated_importance_sampling_type: tis, icepop or seq-mask-tis, or null here",
    ),
    Row(
        "truncation",
        {"loss_fn.truncated_importance_sampling_type": None},
        {"loss_fn.use_importance_sampling_correction": False},
        "use_importance_sampling_correction is false, and there are no weights to bound",
        "write use_importance_sampling_correction: true, or null here",
    ),
    Row(
        "truncation",
        {"loss_fn.truncated_importance_sampling_type": None},
        {"loss_fn.truncated_importance_sampling_ratio": None},
        "truncated_importance_sampling_ratio is null, so there is no bound",
        "write truncated_importance_sampling_ratio, for example 2.0, or null here",
    ),
    Row(
        "truncation",
        {"loss_fn.truncated_importance_sampling_ratio_min": None},
        {"loss_fn.truncated_importance_sampling_type": "tis"},
        "tis has only an upper bound, and nothing reads it",
        "write null, or truncated_importance_sampling_type: icepop",
    ),
    Row(
        "truncation",
        {"loss_fn.truncated_importance_sampling_type": (None, "tis", "icepop")},
        {"loss_fn.sequence_level_importance_ratios": True},
        "sequence_level_importance_ratios is true: with one weight per sequence it is the same as icepop",
        "write truncated_importance_sampling_type: icepop",
    ),
    Row(
        "means",
        {"loss_fn.sequence_normalizer": None},
        {"loss_fn.token_level_loss": True},
        "token_level_loss is true: the mean over all tokens has no normaliser per sequence",
        "write token_level_loss: false, or null here",
    ),
    Row(
        "divergence",
        _DIVERGENCE,
        {"loss_fn.use_kl_in_reward": (False, None), "loss_fn.reference_policy_kl_penalty": 0},
        "reference_policy_kl_penalty is 0: there is no divergence, and nothing reads it",
        "remove it, or write a penalty above 0",
    ),
    Row(
        "divergence",
        {"loss_fn.use_on_policy_kl_approximation": False},
        {"loss_fn.use_kl_in_reward": (False, None), "loss_fn.reference_policy_kl_penalty": 0},
        "reference_policy_kl_penalty is 0: there is no divergence, and nothing reads it",
        "write false",
    ),
    Row(
        "divergence",
        {"loss_fn.reference_policy_kl_type": ("k2", "k3")},
        {
            "loss_fn.use_kl_in_reward": (False, None),
            "has_divergence": True,
            "loss_fn.reference_policy_kl_gradient": "pathwise",
        },
        (
            "its pathwise gradient, that of the log-probability, is 0 on average and would not "
            "constrain the policy"
        ),
        "write reference_policy_kl_gradient: exact, or another type",
    ),
    Row(
        "divergence",
        {"loss_fn.reference_policy_kl_gradient": "exact"},
        {
            "loss_fn.use_kl_in_reward": (False, None),
            "has_divergence": True,
            "loss_fn.reference_policy_kl_type": "k2",
        },
        (
            "reference_policy_kl_type is k2, whose pathwise gradient is already that of the "
            "divergence, the same as exact"
        ),
        "remove it, or write another type",
    ),
    Row(
        "divergence in the reward",
        {"loss_fn.use_kl_in_reward": False},
        {"loss_fn.reference_policy_kl_penalty": 0},
        "reference_policy_kl_penalty is 0, so that it would do nothing",
        "write a penalty, or false here",
    ),
    Row(
        "divergence in the reward",
        {"loss_fn.reference_policy_kl_type": "k1"},
        {"loss_fn.use_kl_in_reward": True},
        "use_kl_in_reward is true: in a reward, only k1 gives the gradient of the divergence",
        "write reference_policy_kl_type: k1",
    ),
    Row(
        "divergence in the reward",
        {"loss_fn.use_on_policy_kl_approximation": False},
        {"loss_fn.use_kl_in_reward": True},
        "use_kl_in_reward is true: the loss has no divergence to weight",
        "write false",
    ),
    Row(
        "divergence in the reward",
        {"loss_fn.reference_policy_kl_gradient": "exact"},
        {"loss_fn.use_kl_in_reward": True},
        "use_kl_in_reward is true: the loss has no divergence to differentiate",
        "remove it",
    ),
)


def _bounds_leave_weights(view: View) -> Iterator[Violation]:
    low = view.get(f"{SECTION}.truncated_importance_sampling_ratio_min")
    high = view.get(f"{SECTION}.truncated_importance_sampling_ratio")
    if None not in (view.get(f"{SECTION}.truncated_importance_sampling_type"), low, high) and low >= high:
        bound = (
            f"it must be less than truncated_importance_sampling_ratio = {high}, or no weight is "
            "within the bounds"
        )
        yield Violation(
            f"{SECTION}.truncated_importance_sampling_ratio_min",
            low,
            bound,
            "write a smaller number, or null",
        )


def faults_of_loss(loss: Mapping[str, object]) -> Iterator[Violation]:
    """Yield the incompatible settings of a clipped policy-gradient loss: those without effect, and those
    that contradict each other.

    Args:
        loss: a ``ClippedPGLossConfig`` with its defaults. A rule that reads an absent key does not apply.
    """
    return apply_rules([*(row.violations for row in _ROWS), _bounds_leave_weights], View({SECTION: loss}))


def faults_of_preference_loss(loss: DPOLossConfig, section: str) -> Iterator[Violation]:
    """Yield the settings of a DPO loss that have no effect.

    Args:
        loss: the settings with their defaults. A rule that reads an absent key does not apply.
        section: dotted path of the settings.
    """
    key: Final = "sft_average_log_probs"
    if loss.get(key) and loss.get("sft_loss_weight") == 0:
        bound = "sft_loss_weight is 0: the loss has no SFT term, and nothing reads it"
        yield Violation(f"{section}.{key}", loss[key], bound, "write false, or an sft_loss_weight above 0")


def loss_goes_together(view: View) -> Iterator[Violation]:
    """Require compatible settings in ``loss_fn``."""
    view.require(view.algorithm.SECTIONS.get(SECTION) is ClippedPGLossConfig and not view.has_faults(SECTION))
    yield from faults_of_loss(view[SECTION])


def preference_loss_goes_together(view: View) -> Iterator[Violation]:
    """Require compatible settings of the DPO loss."""
    section = view.algorithm.section()
    view.require(
        keys_of(DPOLossConfig).keys() <= keys_of(view.algorithm.SECTIONS[section]).keys()
        and not view.has_faults(section)
    )
    yield from faults_of_preference_loss(view[section], section)


def loss_bounds_old_answers(view: View) -> Iterator[Violation]:
    """Require that the loss of asynchronous training corrects for stale responses, and bounds the correction
    on both sides.

    The ratio of the policies then differs from 1 by more than rounding. PPO's clip does not bound it from
    above for a negative advantage, so a bad response that the policy has moved away from could get an
    unbounded weight.
    """
    section = f"{view.algorithm.section()}.{ASYNC}"
    # The top-k distillation loss has no probability ratio.
    view.require(view.get("distillation.mode") != "topk")
    view.require(view.get(f"{section}.enabled") is True and view[f"{section}.max_trajectory_age_steps"] > 0)
    old = (
        f"responses are up to {section}.max_trajectory_age_steps = "
        f"{view[f'{section}.max_trajectory_age_steps']} steps old"
    )
    key = "loss_fn.force_on_policy_ratio"
    if view[key]:
        yield Violation(
            key, True, f"{old}, and this treats them as sampled by the current policy", "write false"
        )
    # With recomputed log-probabilities the clipped ratio is relative to the newest weights, so only the
    # importance weight corrects for the age.
    if view[f"{section}.recompute_logprobs"]:
        key = "loss_fn.use_importance_sampling_correction"
        if not view[key]:
            bound = f"{old}, and with {section}.recompute_logprobs nothing else corrects for that"
            yield Violation(
                key, False, bound, "write true, with truncated_importance_sampling_type: tis and _ratio: 2.0"
            )
        elif view["loss_fn.truncated_importance_sampling_type"] is None:
            key = "loss_fn.truncated_importance_sampling_type"
            bound = f"{old}, and without a bound a single token's importance weight may outweigh the batch"
            yield Violation(key, None, bound, "write tis, with truncated_importance_sampling_ratio: 2.0")
        return
    key = "loss_fn.ratio_clip_c"
    # CISPO clips its weights for advantages of either sign.
    if view[key] is None and not view["loss_fn.use_cispo"]:
        bound = f"{old}, and the ratio of a token with a negative advantage has no other bound"
        yield Violation(key, None, bound, f"write 3.0, or {section}.recompute_logprobs: true")


LOSS_RULES: tuple[Rule, ...] = (loss_goes_together, preference_loss_goes_together, loss_bounds_old_answers)
