"""The sections of losses. Which of their settings go together is in ``megarl.config.rules.losses``."""

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
                "`clipped_pg`, which the keys below are about; or the import path of a class of one's own, "
                "`path/to/file.py:Name`, made of "
                "this section: a ``LossFunction`` (`megarl.algorithms.interfaces`).",
                default=CLIPPED_PG,
            ),
        ]
    ]
    options: NotRequired[Annotated[dict[str, Any], Key("keys of a loss of one's own.", default={})]]
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
            # At 1 the bound would hold as soon as the ratio of a bad answer grows, below 1 from the start.
            Range(low=1, low_open=True),
            advice="write null to turn the second clip off, or for example 3.0",
        ),
    ]
    use_on_policy_kl_approximation: Annotated[
        bool, Key("weigh the divergence by the ratio of current to generation policy.")
    ]
    use_importance_sampling_correction: Annotated[
        bool,
        Key(
            "weigh each token, or with ratios of sequences each sequence, by the ratio of training to "
            "generation policy."
        ),
    ]
    truncated_importance_sampling_type: NotRequired[
        Annotated[
            Literal["tis", "icepop", "seq-mask-tis"] | None,
            Key(
                "what becomes of weights out of bounds: `tis` takes the upper bound in their place, "
                "`icepop` 0, and `seq-mask-tis` takes 0 "
                "for all tokens of a sequence whose geometric mean is out of bounds, and all other weights "
                "as they are; null for nothing.",
                default=None,
            ),
        ]
    ]
    truncated_importance_sampling_ratio: NotRequired[
        Annotated[float | None, Key("the upper bound of those weights.", ABOVE_0, default=None)]
    ]
    truncated_importance_sampling_ratio_min: NotRequired[
        Annotated[
            float | None,
            Key("their lower bound (`icepop`, `seq-mask-tis`); null for none.", ABOVE_0, default=None),
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
                "the previous log-probabilities are the current ones, so that the ratio is exactly 1 and no "
                "pass computes them, unless "
                "``grpo.max_token_mult_prob_error`` needs it; for batches that are trained on once.",
                default=False,
            ),
        ]
    ]
    sequence_level_importance_ratios: NotRequired[
        Annotated[
            bool,
            Key(
                "one ratio a sequence, the geometric mean of those of its tokens, which is clipped as a "
                "whole (GSPO).",
                default=False,
            ),
        ]
    ]
    sequence_level_ratio_gradient: NotRequired[
        Annotated[
            Literal["sequence", "token"],
            Key(
                "`sequence` for the gradient of a sequence's ratio (GSPO); with `token` it has the value of "
                "the sequence and the gradient "
                "of the token (GSPO-token). They differ where advantages do within a sequence.",
                default="sequence",
            ),
        ]
    ]
    use_cispo: NotRequired[
        Annotated[
            bool,
            Key(
                "the clipped ratio is a constant weight of the log-probability, so that clipped tokens keep "
                "a gradient (CISPO); "
                "``ratio_clip_min: 1`` has no lower bound, as its paper has none.",
                default=False,
            ),
        ]
    ]
    sequence_normalizer: NotRequired[
        Annotated[
            float | None,
            Key(
                "constant that the sum over each sequence's tokens is divided by in place of their number, "
                "such as the longest response "
                "(Dr.GRPO), before the mean over sequences; null for their number.",
                ABOVE_0,
                default=None,
            ),
        ]
    ]
    reference_policy_kl_type: NotRequired[
        Annotated[
            Literal["k1", "k2", "k3"],
            Key(
                "how the divergence of a token is estimated: `k1` -d, `k2` d^2 / 2, `k3` exp(d) - d - 1 "
                "with d = reference - current.",
                default="k3",
            ),
        ]
    ]
    use_kl_in_reward: NotRequired[
        Annotated[
            bool,
            Key(
                "subtract the divergence from the rewards, instead of adding it to the loss. With "
                "`reinforce_plus_plus` a token's return "
                "loses the divergence of it and of all later tokens; otherwise a response's reward loses "
                "that of the whole response.",
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
                "the logarithm of the probability ratio is clamped to plus and minus this; null for no "
                "clamp.",
                ABOVE_0,
                default=20.0,
            ),
        ]
    ]
    kl_input_clamp_value: NotRequired[
        Annotated[
            float | None,
            Key(
                "bound on the difference of log-probabilities in the divergence, clamped in value and "
                "gradient; null for none.",
                ABOVE_0,
                default=20.0,
            ),
        ]
    ]
    kl_output_clamp_value: NotRequired[
        Annotated[
            float | None,
            Key("the divergence of a token is clamped to this; its gradient goes on.", ABOVE_0, default=10.0),
        ]
    ]
    entropy_coef: NotRequired[
        Annotated[
            float,
            Key(
                "weight of the entropy bonus: the loss is lower by this times the mean entropy (nats) of "
                "the distributions that the tokens "
                "are drawn from, with the temperature and what top-k and top-p keep, normalised like the "
                "loss; 0 computes none.",
                AT_LEAST_0,
                default=0.0,
            ),
        ]
    ]


class DPOLossConfig(TypedDict):
    """Direct preference optimisation: the loss."""

    reference_policy_kl_penalty: NotRequired[
        Annotated[
            float,
            Key(
                "beta: how dear it is to leave the reference policy; of `ipo`, the paper's tau.",
                ABOVE_0,
                default=0.05,
            ),
        ]
    ]
    preference_loss_type: NotRequired[
        Annotated[
            Literal["sigmoid", "ipo"],
            Key(
                "of the margin between both rewards m: `sigmoid` has -log sigmoid(beta m), DPO's, `ipo` the "
                "square of m - 1 / (2 beta).",
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
                "the reward of an answer is a mean over its tokens, not their sum (length-normalised; `ipo` "
                "in TRL).",
                default=False,
            ),
        ]
    ]
    sft_loss_weight: NotRequired[
        Annotated[
            float,
            Key(
                "weight of the negative log-likelihood of the chosen answers; 0 for none.",
                AT_LEAST_0,
                default=0.0,
            ),
        ]
    ]
    sft_average_log_probs: NotRequired[
        Annotated[bool, Key("that likelihood is a mean over tokens, not their sum.", default=False)]
    ]


class DistillationLossConfig(TypedDict):
    """Divergence of the policy from a teacher over the teacher's most likely tokens: the loss."""

    kl_type: NotRequired[
        Annotated[
            Literal["forward", "reverse", "mixed"],
            Key(
                "`forward` is KL(teacher || policy), `reverse` KL(policy || teacher), `mixed` the sum of "
                "both by ``mixed_kl_weight``.",
                default="reverse",
            ),
        ]
    ]
    mixed_kl_weight: NotRequired[
        Annotated[
            float,
            Key(
                "weight of the forward divergence in `mixed`; the reverse one has the rest of 1.",
                SHARE,
                default=0.5,
            ),
        ]
    ]
    outside_topk: NotRequired[
        Annotated[
            Literal["rest", "renormalize"],
            Key(
                "probability of all other tokens: with `rest` it counts as that of one more token, so that "
                "the divergence is a lower bound "
                "of that over the whole vocabulary; `renormalize` leaves it out and divides by what is "
                "left, so that nothing keeps the "
                "policy from other tokens.",
                default="rest",
            ),
        ]
    ]
