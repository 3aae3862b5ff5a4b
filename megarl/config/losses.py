"""Schema of the loss sections. The rules between their settings are in ``megarl.config.rules.losses``."""

from __future__ import annotations

from typing import Annotated, Any, Literal, NotRequired

from typing_extensions import TypedDict

from megarl.key import ABOVE_0, AT_LEAST_0, SHARE, Key, Range

SECTION = "loss_fn"
FUNCTION = f"{SECTION}.function"
CLIPPED_PG = "clipped_pg"
ESTIMATOR = "grpo.adv_estimator.name"
ESTIMATORS = ("grpo", "rloo", "gdpo", "reinforce_plus_plus")
"""Built-in estimators of advantages."""


class ClippedPGLossConfig(TypedDict):
    """Clipped policy-gradient loss."""

    function: NotRequired[
        Annotated[
            str,
            Key(
                "``clipped_pg``, to which the keys below belong; or the import path of your own class, "
                "``path/to/file.py:Name``, a ``LossFunction`` (``megarl.algorithms.interfaces``) that is "
                "built from this section.",
                default=CLIPPED_PG,
            ),
        ]
    ]
    options: NotRequired[Annotated[dict[str, Any], Key("settings of your own loss.", default={})]]
    reference_policy_kl_penalty: Annotated[
        float,
        Key(
            "weight of the divergence from the reference policy; 0 runs without a reference policy.",
            AT_LEAST_0,
        ),
    ]
    ratio_clip_min: Annotated[float, Key("the probability ratio is clipped below 1 minus this.", SHARE)]
    ratio_clip_max: Annotated[float, Key("the probability ratio is clipped above 1 plus this.", AT_LEAST_0)]
    ratio_clip_c: Annotated[
        float | None,
        Key(
            "bound of the second clip, for negative advantages; null turns it off.",
            # At 1 the bound would apply as soon as the ratio of an incorrect response grows, and below 1 from
            # the start.
            Range(low=1, low_open=True),
            advice="write null to turn the second clip off, or for example 3.0",
        ),
    ]
    use_on_policy_kl_approximation: Annotated[
        bool,
        Key("weigh the divergence by the probability ratio of the current policy to the generation policy."),
    ]
    use_importance_sampling_correction: Annotated[
        bool,
        Key(
            "weigh each token, or each sequence if ratios are of sequences, by the probability ratio of "
            "the training policy to the generation policy."
        ),
    ]
    truncated_importance_sampling_type: NotRequired[
        Annotated[
            Literal["tis", "icepop", "seq-mask-tis"] | None,
            Key(
                "what happens to weights out of bounds: ``tis`` replaces them by the upper bound, "
                "``icepop`` by 0; ``seq-mask-tis`` sets all tokens of a sequence to 0 if the sequence's "
                "geometric mean is out of bounds, and changes no other weight; null does nothing.",
                default=None,
            ),
        ]
    ]
    truncated_importance_sampling_ratio: NotRequired[
        Annotated[float | None, Key("upper bound of those weights.", ABOVE_0, default=None)]
    ]
    truncated_importance_sampling_ratio_min: NotRequired[
        Annotated[
            float | None,
            Key(
                "lower bound of those weights (``icepop``, ``seq-mask-tis``); null for none.",
                ABOVE_0,
                default=None,
            ),
        ]
    ]
    token_level_loss: Annotated[
        bool, Key("mean over tokens; otherwise mean over each sequence, then over sequences.")
    ]
    disable_ppo_ratio: NotRequired[
        Annotated[
            bool,
            Key("plain policy gradient, without the ratio to previous log-probabilities.", default=False),
        ]
    ]
    force_on_policy_ratio: NotRequired[
        Annotated[
            bool,
            Key(
                "use the current log-probabilities as the previous ones: the ratio is exactly 1, and no "
                "pass computes them unless ``grpo.max_token_mult_prob_error`` needs it. For batches that "
                "are trained on once.",
                default=False,
            ),
        ]
    ]
    sequence_level_importance_ratios: NotRequired[
        Annotated[
            bool,
            Key(
                "use one ratio per sequence, the geometric mean of its tokens' ratios, and clip it as a "
                "whole (GSPO).",
                default=False,
            ),
        ]
    ]
    sequence_level_ratio_gradient: NotRequired[
        Annotated[
            Literal["sequence", "token"],
            Key(
                "``sequence``: the gradient of a sequence's ratio (GSPO); ``token``: the value of the "
                "sequence's ratio with the gradient of the token's (GSPO-token). They differ if advantages "
                "differ within a sequence.",
                default="sequence",
            ),
        ]
    ]
    use_cispo: NotRequired[
        Annotated[
            bool,
            Key(
                "use the clipped ratio as a constant weight of the log-probability, so that clipped tokens "
                "keep a gradient (CISPO); ``ratio_clip_min: 1`` means no lower bound, as in the paper.",
                default=False,
            ),
        ]
    ]
    sequence_normalizer: NotRequired[
        Annotated[
            float | None,
            Key(
                "constant that replaces a sequence's number of tokens as the divisor of its sum, such as "
                "the maximum response length (Dr.GRPO), before the mean over sequences; null for the "
                "number of tokens.",
                ABOVE_0,
                default=None,
            ),
        ]
    ]
    reference_policy_kl_type: NotRequired[
        Annotated[
            Literal["k1", "k2", "k3"],
            Key(
                "estimator of a token's divergence: ``k1`` -d, ``k2`` d^2 / 2, ``k3`` exp(d) - d - 1 with "
                "d = reference - current.",
                default="k3",
            ),
        ]
    ]
    use_kl_in_reward: NotRequired[
        Annotated[
            bool,
            Key(
                "subtract the divergence from the rewards instead of adding it to the loss. With "
                "``reinforce_plus_plus`` a token's return loses the divergence of this and all later "
                "tokens; otherwise a response's reward loses that of the whole response.",
                default=False,
            ),
        ]
    ]
    reference_policy_kl_gradient: NotRequired[
        Annotated[
            Literal["exact", "pathwise"],
            Key(
                "`exact` for the gradient of the divergence; `pathwise` leaves out its score-function part.",
                default="exact",
            ),
        ]
    ]
    log_ratio_clamp_value: NotRequired[
        Annotated[
            float | None,
            Key(
                "clamp the logarithm of the probability ratio to plus and minus this; null for no clamp.",
                ABOVE_0,
                default=20.0,
            ),
        ]
    ]
    kl_input_clamp_value: NotRequired[
        Annotated[
            float | None,
            Key(
                "clamp the difference of log-probabilities in the divergence to plus and minus this, in "
                "value and gradient; null for no clamp.",
                ABOVE_0,
                default=20.0,
            ),
        ]
    ]
    kl_output_clamp_value: NotRequired[
        Annotated[
            float | None,
            Key("clamp the divergence of a token to this; its gradient is kept.", ABOVE_0, default=10.0),
        ]
    ]
    entropy_coef: NotRequired[
        Annotated[
            float,
            Key(
                "weight of the entropy bonus: the loss is reduced by this times the mean entropy (nats) of "
                "the distributions that tokens are sampled from, after temperature, top-k and top-p, "
                "normalised like the loss; 0 computes none.",
                AT_LEAST_0,
                default=0.0,
            ),
        ]
    ]


class DPOLossConfig(TypedDict):
    """Loss of direct preference optimisation (DPO)."""

    reference_policy_kl_penalty: NotRequired[
        Annotated[
            float,
            Key(
                "beta: how strongly leaving the reference policy is penalised; with ``ipo``, the paper's "
                "tau.",
                ABOVE_0,
                default=0.05,
            ),
        ]
    ]
    preference_loss_type: NotRequired[
        Annotated[
            Literal["sigmoid", "ipo"],
            Key(
                "loss of the margin m between the two rewards: ``sigmoid`` is DPO's -log sigmoid(beta m), "
                "``ipo`` the square of m - 1 / (2 beta).",
                default="sigmoid",
            ),
        ]
    ]
    preference_loss_weight: NotRequired[
        Annotated[float, Key("weight of the preference loss.", ABOVE_0, default=1.0)]
    ]
    preference_average_log_probs: NotRequired[
        Annotated[
            bool,
            Key(
                "take the mean over a response's tokens as its reward, not their sum (length-normalised; "
                "``ipo`` in TRL).",
                default=False,
            ),
        ]
    ]
    sft_loss_weight: NotRequired[
        Annotated[
            float,
            Key(
                "weight of the negative log-likelihood of the chosen responses; 0 for none.",
                AT_LEAST_0,
                default=0.0,
            ),
        ]
    ]
    sft_average_log_probs: NotRequired[
        Annotated[bool, Key("take the mean over tokens for that likelihood, not their sum.", default=False)]
    ]


class DistillationLossConfig(TypedDict):
    """Distillation loss: divergence of the policy from a teacher over the teacher's most likely tokens."""

    kl_type: NotRequired[
        Annotated[
            Literal["forward", "reverse", "mixed"],
            Key(
                "``forward`` is KL(teacher || policy), ``reverse`` KL(policy || teacher), ``mixed`` their "
                "sum, weighted by ``mixed_kl_weight``.",
                default="reverse",
            ),
        ]
    ]
    mixed_kl_weight: NotRequired[
        Annotated[
            float,
            Key(
                "weight of the forward divergence in ``mixed``; the reverse divergence has 1 minus this.",
                SHARE,
                default=0.5,
            ),
        ]
    ]
    outside_topk: NotRequired[
        Annotated[
            Literal["rest", "renormalize"],
            Key(
                "how the probability of all other tokens counts: ``rest`` treats them as one more token, "
                "so that the divergence is a lower bound of that over the whole vocabulary; "
                "``renormalize`` leaves them out and divides by the probability of the others, so that "
                "nothing keeps the policy from the tokens that are left out.",
                default="rest",
            ),
        ]
    ]
