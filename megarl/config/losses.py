"""Schema of the loss sections. ``megarl.config.rules.losses`` checks which of their settings are
compatible."""

from __future__ import annotations

from typing import Annotated, Any, Literal, NotRequired

from typing_extensions import TypedDict

from megarl.key import ABOVE_0, AT_LEAST_0, SHARE, Key, Range

SECTION = "loss_fn"
FUNCTION = f"{SECTION}.function"
CLIPPED_PG = "clipped_pg"
ESTIMATOR = "grpo.adv_estimator.name"
ESTIMATORS = ("grpo", "rloo", "gdpo", "reinforce_plus_plus")
"""Names of the built-in advantage estimators."""


class ClippedPGLossConfig(TypedDict):
    """Clipped policy-gradient loss, or a custom loss in its place."""

    function: NotRequired[
        Annotated[
            str,
            Key(
                "loss: ``clipped_pg``, which the other keys of this section configure; or the import path "
                "of a custom class, ``path/to/file.py:Name``, a ``LossFunction`` "
                "(``megarl.algorithms.interfaces``) that is constructed with this section.",
                default=CLIPPED_PG,
            ),
        ]
    ]
    options: NotRequired[Annotated[dict[str, Any], Key("settings passed to a custom loss.", default={})]]
    reference_policy_kl_penalty: Annotated[
        float,
        Key(
            "weight of the KL from the reference policy, in the loss or, with ``use_kl_in_reward``, in "
            "the rewards; 0 runs without a reference policy.",
            AT_LEAST_0,
        ),
    ]
    ratio_clip_min: Annotated[
        float,
        Key(
            "lower clip of the probability ratio (current to previous policy): at least 1 minus this.", SHARE
        ),
    ]
    ratio_clip_max: Annotated[
        float,
        Key(
            "upper clip of the probability ratio (current to previous policy): at most 1 plus this.",
            AT_LEAST_0,
        ),
    ]
    ratio_clip_c: Annotated[
        float | None,
        Key(
            "dual clip: a token with a negative advantage A has a loss of at most -A times this, "
            "however large its ratio is; null turns it off.",
            # At 1 the dual clip would stop the gradient as soon as the ratio grows, and below 1 even at the
            # start.
            Range(low=1, low_open=True),
            advice="write null to turn the second clip off, or for example 3.0",
        ),
    ]
    use_on_policy_kl_approximation: Annotated[
        bool,
        Key(
            "multiply a token's KL estimate by the probability ratio of the current policy to the "
            "policy that generated the token, as a constant."
        ),
    ]
    use_importance_sampling_correction: Annotated[
        bool,
        Key(
            "multiply a token's loss by its importance weight: the probability ratio of the policy "
            "before the update to the engine that generated the token. With "
            "``sequence_level_importance_ratios`` it is the ratio of the sequence."
        ),
    ]
    truncated_importance_sampling_type: NotRequired[
        Annotated[
            Literal["tis", "icepop", "seq-mask-tis"] | None,
            Key(
                "what happens to importance weights outside their bounds: ``tis`` replaces those above the "
                "upper bound by it, ``icepop`` replaces those outside both bounds by 0; ``seq-mask-tis`` "
                "sets all weights of a sequence to 0 if their geometric mean is outside the bounds, and "
                "changes no other weight; null leaves them unbounded.",
                default=None,
            ),
        ]
    ]
    truncated_importance_sampling_ratio: NotRequired[
        Annotated[
            float | None,
            Key(
                "upper bound of the importance weights of ``truncated_importance_sampling_type``; null if "
                "that is null.",
                ABOVE_0,
                default=None,
            ),
        ]
    ]
    truncated_importance_sampling_ratio_min: NotRequired[
        Annotated[
            float | None,
            Key(
                "lower bound of the importance weights (``icepop``, ``seq-mask-tis``); null for no lower "
                "bound.",
                ABOVE_0,
                default=None,
            ),
        ]
    ]
    token_level_loss: Annotated[
        bool,
        Key(
            "true averages the loss over all tokens of the global batch; false averages it over the "
            "tokens of each sequence, then over sequences."
        ),
    ]
    disable_ppo_ratio: NotRequired[
        Annotated[
            bool,
            Key(
                "use the log-probability itself in place of the clipped probability ratio: the plain policy "
                "gradient (REINFORCE).",
                default=False,
            ),
        ]
    ]
    force_on_policy_ratio: NotRequired[
        Annotated[
            bool,
            Key(
                "take the current log-probabilities as the previous ones, too: the ratio is exactly 1, and "
                "the pass that computes previous log-probabilities is left out unless "
                "``grpo.max_token_mult_prob_error`` needs it. Meant for steps that train on each batch "
                "once.",
                default=False,
            ),
        ]
    ]
    sequence_level_importance_ratios: NotRequired[
        Annotated[
            bool,
            Key(
                "use one probability ratio per sequence, the geometric mean of its tokens' ratios, and clip "
                "that (GSPO).",
                default=False,
            ),
        ]
    ]
    sequence_level_ratio_gradient: NotRequired[
        Annotated[
            Literal["sequence", "token"],
            Key(
                "gradient of a sequence's ratio: ``sequence`` differentiates the geometric mean itself "
                "(GSPO); ``token`` keeps its value, and gives each token the gradient of its own ratio "
                "(GSPO-token). They differ only if advantages differ within a sequence.",
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
                "number by which the sum over a sequence's tokens is divided, before the mean over "
                "sequences, such as the maximum response length (Dr.GRPO); null for the number of tokens of "
                "the sequence.",
                ABOVE_0,
                default=None,
            ),
        ]
    ]
    reference_policy_kl_type: NotRequired[
        Annotated[
            Literal["k1", "k2", "k3"],
            Key(
                "estimator of the KL at a token: ``k1`` is -d, ``k2`` d^2 / 2, ``k3`` exp(d) - d - 1, where "
                "d is the reference policy's log-probability minus the current one.",
                default="k3",
            ),
        ]
    ]
    use_kl_in_reward: NotRequired[
        Annotated[
            bool,
            Key(
                "subtract the KL from the rewards instead of adding it to the loss. With "
                "``reinforce_plus_plus`` a token's return is reduced by the KL of this token and all later "
                "ones; otherwise a response's reward is reduced by the KL of the whole response.",
                default=False,
            ),
        ]
    ]
    reference_policy_kl_gradient: NotRequired[
        Annotated[
            Literal["exact", "pathwise"],
            Key(
                "`exact` for the gradient of the expected KL over sampled tokens; `pathwise` leaves out its "
                "score-function term, as most trainers do.",
                default="exact",
            ),
        ]
    ]
    log_ratio_clamp_value: NotRequired[
        Annotated[
            float | None,
            Key(
                "clamp the logarithm of the probability ratio to plus and minus this, without a gradient "
                "beyond; null for no clamp.",
                ABOVE_0,
                default=20.0,
            ),
        ]
    ]
    kl_input_clamp_value: NotRequired[
        Annotated[
            float | None,
            Key(
                "clamp the difference of log-probabilities inside the KL estimate to plus and minus this, "
                "which limits the estimate and the size of its gradient; null for no clamp.",
                ABOVE_0,
                default=20.0,
            ),
        ]
    ]
    kl_output_clamp_value: NotRequired[
        Annotated[
            float | None,
            Key(
                "clamp the KL estimate of a token to plus and minus this; the token keeps its gradient. "
                "null for no clamp.",
                ABOVE_0,
                default=10.0,
            ),
        ]
    ]
    entropy_coef: NotRequired[
        Annotated[
            float,
            Key(
                "weight of the entropy bonus: the loss is reduced by this times the mean entropy in nats of "
                "the distributions that tokens are sampled from (after temperature, top-k and top-p), "
                "averaged like the loss; 0 computes no entropy.",
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
                "beta: how strongly the loss keeps the policy near the reference policy; with ``ipo``, the "
                "paper's tau.",
                ABOVE_0,
                default=0.05,
            ),
        ]
    ]
    preference_loss_type: NotRequired[
        Annotated[
            Literal["sigmoid", "ipo"],
            Key(
                "loss as a function of the margin m, the chosen answer's reward minus the rejected one's (a "
                "reward is the log-probability ratio of policy to reference): ``sigmoid`` is DPO's -log "
                "sigmoid(beta m), ``ipo`` is (m - 1 / (2 beta))^2.",
                default="sigmoid",
            ),
        ]
    ]
    preference_loss_weight: NotRequired[
        Annotated[
            float, Key("weight of the preference loss in the sum with the SFT loss.", ABOVE_0, default=1.0)
        ]
    ]
    preference_average_log_probs: NotRequired[
        Annotated[
            bool,
            Key(
                "take the mean over an answer's tokens as its reward instead of the sum (length-normalised; "
                "TRL does so for ``ipo``).",
                default=False,
            ),
        ]
    ]
    sft_loss_weight: NotRequired[
        Annotated[
            float,
            Key(
                "weight of the SFT loss, the negative log-likelihood of the chosen answers; 0 for none.",
                AT_LEAST_0,
                default=0.0,
            ),
        ]
    ]
    sft_average_log_probs: NotRequired[
        Annotated[
            bool,
            Key("take the mean over an answer's tokens in the SFT loss instead of the sum.", default=False),
        ]
    ]


class DistillationLossConfig(TypedDict):
    """Distillation loss: the KL between policy and teacher over the teacher's most likely tokens."""

    kl_type: NotRequired[
        Annotated[
            Literal["forward", "reverse", "mixed"],
            Key(
                "``forward`` is KL(teacher || policy), ``reverse`` KL(policy || teacher), ``mixed`` the sum "
                "of both, weighted by ``mixed_kl_weight``.",
                default="reverse",
            ),
        ]
    ]
    mixed_kl_weight: NotRequired[
        Annotated[
            float,
            Key(
                "`mixed`: weight of the forward KL; the reverse KL has 1 minus this.",
                SHARE,
                default=0.5,
            ),
        ]
    ]
    outside_topk: NotRequired[
        Annotated[
            Literal["rest", "renormalize"],
            Key(
                "treatment of the tokens outside the teacher's top k: ``rest`` counts their total "
                "probability as one more token, so the KL is a lower bound of the KL over the whole "
                "vocabulary; ``renormalize`` leaves them out and rescales the top k to sum to 1, so nothing "
                "keeps the policy from giving probability to the others.",
                default="rest",
            ),
        ]
    ]
