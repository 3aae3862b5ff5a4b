"""The sections of losses, and which of their settings go together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Final, Literal, NotRequired, cast

from typing_extensions import TypedDict

from megarl.errors import Violation
from megarl.key import ABOVE_0, AT_LEAST_0, SHARE, Key, Range, defaults_of, keys_of

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
                "`clipped_pg`, which the keys below are about; or the import path of a class of one's own, `path/to/file.py:Name`, made of "
                "this section: a ``LossFunction`` (`megarl.algorithms.interfaces`).",
                default=CLIPPED_PG,
            ),
        ]
    ]
    options: NotRequired[Annotated[dict[str, Any], Key("keys of a loss of one's own.", default={})]]
    reference_policy_kl_penalty: Annotated[
        float, Key("weight of the divergence from the reference policy; 0 needs no reference policy.", AT_LEAST_0)
    ]
    ratio_clip_min: Annotated[float, Key("the probability ratio is clipped below 1 minus this.", SHARE)]
    ratio_clip_max: Annotated[float, Key("the probability ratio is clipped above 1 plus this.", AT_LEAST_0)]
    ratio_clip_c: Annotated[
        float | None,
        Key(
            "bound of the second clip, for negative advantages; null turns it off.",
            Range(low=1, low_open=True),
            advice="write null to turn the second clip off, or for example 3.0",
        ),
    ]
    use_on_policy_kl_approximation: Annotated[bool, Key("weigh the divergence by the ratio of current to generation policy.")]
    use_importance_sampling_correction: Annotated[
        bool,
        Key("weigh each token, or with ratios of sequences each sequence, by the ratio of training to generation policy."),
    ]
    truncated_importance_sampling_type: NotRequired[
        Annotated[
            Literal["tis", "icepop", "seq-mask-tis"] | None,
            Key(
                "what becomes of weights out of bounds: `tis` takes the upper bound in their place, `icepop` 0, and `seq-mask-tis` takes 0 "
                "for all tokens of a sequence whose geometric mean is out of bounds, and all other weights as they are; null for nothing.",
                default=None,
            ),
        ]
    ]
    truncated_importance_sampling_ratio: NotRequired[
        Annotated[float | None, Key("the upper bound of those weights.", ABOVE_0, default=None)]
    ]
    truncated_importance_sampling_ratio_min: NotRequired[
        Annotated[float | None, Key("their lower bound (`icepop`, `seq-mask-tis`); null for none.", ABOVE_0, default=None)]
    ]
    token_level_loss: Annotated[bool, Key("mean over tokens; otherwise mean over each sequence, then over sequences.")]
    disable_ppo_ratio: NotRequired[Annotated[bool, Key("plain policy gradient, no ratio to previous log-probabilities.", default=False)]]
    force_on_policy_ratio: NotRequired[
        Annotated[
            bool,
            Key(
                "the previous log-probabilities are the current ones, so that the ratio is exactly 1 and no pass computes them, unless "
                "``grpo.max_token_mult_prob_error`` needs it; for batches that are trained on once.",
                default=False,
            ),
        ]
    ]
    sequence_level_importance_ratios: NotRequired[
        Annotated[
            bool,
            Key("one ratio a sequence, the geometric mean of those of its tokens, which is clipped as a whole (GSPO).", default=False),
        ]
    ]
    sequence_level_ratio_gradient: NotRequired[
        Annotated[
            Literal["sequence", "token"],
            Key(
                "`sequence` for the gradient of a sequence's ratio (GSPO); with `token` it has the value of the sequence and the gradient "
                "of the token (GSPO-token). They differ where advantages do within a sequence.",
                default="sequence",
            ),
        ]
    ]
    use_cispo: NotRequired[
        Annotated[
            bool,
            Key(
                "the clipped ratio is a constant weight of the log-probability, so that clipped tokens keep a gradient (CISPO); "
                "``ratio_clip_min: 1`` has no lower bound, as its paper has none.",
                default=False,
            ),
        ]
    ]
    sequence_normalizer: NotRequired[
        Annotated[
            float | None,
            Key(
                "constant that the sum over each sequence's tokens is divided by in place of their number, such as the longest response "
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
                "how the divergence of a token is estimated: `k1` -d, `k2` d^2 / 2, `k3` exp(d) - d - 1 with d = reference - current.",
                default="k3",
            ),
        ]
    ]
    use_kl_in_reward: NotRequired[
        Annotated[
            bool,
            Key(
                "the divergence is taken from the rewards and is not in the loss: from the return of each token that of it and all later "
                "tokens with `reinforce_plus_plus`, otherwise that of the answer from its reward.",
                default=False,
            ),
        ]
    ]
    reference_policy_kl_gradient: NotRequired[
        Annotated[
            Literal["exact", "pathwise"],
            Key("`exact` for the gradient of the divergence; `pathwise` leaves out its score-function part.", default="exact"),
        ]
    ]
    log_ratio_clamp_value: NotRequired[
        Annotated[
            float | None,
            Key("the logarithm of the probability ratio is clamped to plus and minus this; null for no clamp.", ABOVE_0, default=20.0),
        ]
    ]
    kl_input_clamp_value: NotRequired[
        Annotated[
            float | None,
            Key(
                "the difference of log-probabilities in the divergence is clamped alike, in its value and its gradient.",
                ABOVE_0,
                default=20.0,
            ),
        ]
    ]
    kl_output_clamp_value: NotRequired[
        Annotated[float | None, Key("the divergence of a token is clamped to this; its gradient goes on.", ABOVE_0, default=10.0)]
    ]
    entropy_coef: NotRequired[
        Annotated[
            float,
            Key(
                "weight of the entropy bonus: the loss is lower by this times the mean entropy (nats) of the distributions that the tokens "
                "are drawn from, with the temperature and what top-k and top-p keep, normalised like the loss; 0 computes none.",
                AT_LEAST_0,
                default=0.0,
            ),
        ]
    ]


_DEFAULTS = defaults_of(ClippedPGLossConfig)
_CLAMPS = {name: value for name, value in _DEFAULTS.items() if name.endswith("_clamp_value")}
_CLAMPS_OF_DIVERGENCE = {name: value for name, value in _CLAMPS.items() if name.startswith("kl_")}


class DPOLossConfig(TypedDict):
    """Direct preference optimisation: the loss."""

    reference_policy_kl_penalty: NotRequired[
        Annotated[float, Key("beta: how dear it is to leave the reference policy; of `ipo`, the paper's tau.", ABOVE_0, default=0.05)]
    ]
    preference_loss_type: NotRequired[
        Annotated[
            Literal["sigmoid", "ipo"],
            Key(
                "of the margin between both rewards m: `sigmoid` has -log sigmoid(beta m), DPO's, `ipo` the square of m - 1 / (2 beta).",
                default="sigmoid",
            ),
        ]
    ]
    preference_loss_weight: NotRequired[Annotated[float, Key("weight of the preference loss.", ABOVE_0, default=1.0)]]
    preference_average_log_probs: NotRequired[
        Annotated[
            bool,
            Key("the reward of an answer is a mean over its tokens, not their sum (length-normalised; `ipo` in TRL).", default=False),
        ]
    ]
    sft_loss_weight: NotRequired[
        Annotated[float, Key("weight of the negative log-likelihood of the chosen answers; 0 for none.", AT_LEAST_0, default=0.0)]
    ]
    sft_average_log_probs: NotRequired[Annotated[bool, Key("that likelihood is a mean over tokens, not their sum.", default=False)]]


class DistillationLossConfig(TypedDict):
    """Divergence of the policy from a teacher over the teacher's most likely tokens: the loss."""

    kl_type: NotRequired[
        Annotated[
            Literal["forward", "reverse", "mixed"],
            Key(
                "`forward` is KL(teacher || policy), `reverse` KL(policy || teacher), `mixed` the sum of both by ``mixed_kl_weight``.",
                default="reverse",
            ),
        ]
    ]
    mixed_kl_weight: NotRequired[
        Annotated[float, Key("weight of the forward divergence in `mixed`; the reverse one has the rest of 1.", SHARE, default=0.5)]
    ]
    outside_topk: NotRequired[
        Annotated[
            Literal["rest", "renormalize"],
            Key(
                "probability of all other tokens: with `rest` it counts as that of one more token, so that the divergence is a lower bound "
                "of that over the whole vocabulary; `renormalize` leaves it out and divides by what is left, so that nothing keeps the "
                "policy from other tokens.",
                default="rest",
            ),
        ]
    ]


_KIND: Final = "reference_policy_kl_type"
_GRADIENT: Final = "reference_policy_kl_gradient"
_APPROXIMATION: Final = "use_on_policy_kl_approximation"
_IN_REWARD: Final = "use_kl_in_reward"


def faults_of_loss(loss: ClippedPGLossConfig) -> Iterator[Violation]:
    """Yield what does not go together in a clipped policy gradient: settings that would do nothing, or whose combination has no meaning.

    Args:
        loss: with its defaults; keys that it lacks silence what needs them.
    """
    loss = cast(ClippedPGLossConfig, {**dict.fromkeys(keys_of(ClippedPGLossConfig)), **loss})
    for found in (
        _faults_of_ratios,
        _faults_of_forced_ratios,
        _faults_of_cispo,
        _faults_of_truncation,
        _faults_of_means,
        _faults_of_divergence,
    ):
        yield from found(loss)


def faults_of_preference_loss(loss: DPOLossConfig, section: str) -> Iterator[Violation]:
    """Yield what would do nothing in a loss of preferences.

    Args:
        loss: with its defaults; keys that it lacks silence what needs them.
        section: that its keys stand in.
    """
    key: Final = "sft_average_log_probs"
    if loss.get(key) and loss.get("sft_loss_weight") == 0:
        bound = "sft_loss_weight is 0: the loss has no likelihood of the chosen answers, and nothing reads it"
        yield Violation(f"{section}.{key}", loss[key], bound, "write false, or an sft_loss_weight above 0")


def _faults_of_ratios(loss: ClippedPGLossConfig) -> Iterator[Violation]:
    ratios: Final = "sequence_level_importance_ratios"
    if loss["disable_ppo_ratio"]:
        for key in (ratios, "use_cispo"):
            if loss[key]:
                yield _fault(loss, key, "disable_ppo_ratio is true, and without a ratio it would do nothing", "switch one of the two off")
        if loss["ratio_clip_c"] is not None:
            bound = "disable_ppo_ratio is true: the objective of a bad token has its log-probability for the ratio, and is never as large"
            yield _fault(loss, "ratio_clip_c", bound, "write null")
        yield from _faults_of_unread_clamp(loss, "disable_ppo_ratio is true, and there is no ratio to clamp")
    gradient: Final = "sequence_level_ratio_gradient"
    if loss[gradient] == "token" and not loss[ratios]:
        yield _fault(loss, gradient, f"it says whose gradient the ratio of a sequence has, and {ratios} is false", f"write {ratios}: true")
    if loss[ratios] and loss["token_level_loss"]:
        bound = f"{ratios} is true: the objective of a sequence counts once, not once a token (GSPO, arXiv 2507.18071, equation 5)"
        fix = f"write token_level_loss: false, with sequence_normalizer: 1 to count it once a token (LUSPO), or {ratios}: false"
        yield _fault(loss, "token_level_loss", bound, fix)


def _faults_of_forced_ratios(loss: ClippedPGLossConfig) -> Iterator[Violation]:
    if not loss["force_on_policy_ratio"]:
        return
    if loss["use_cispo"]:
        bound = "force_on_policy_ratio is true: the ratio is 1, a weight of 1 does nothing, and the gradient is the same without it"
        yield _fault(loss, "use_cispo", bound, "switch one of the two off")
    if loss["ratio_clip_c"] is not None:
        yield _fault(loss, "ratio_clip_c", "force_on_policy_ratio is true: the ratio is 1 and never as large as this", "write null")
    if loss["disable_ppo_ratio"]:
        bound = "force_on_policy_ratio is true: the ratio is 1, and the gradient is that of the log-probability with and without it"
        yield _fault(loss, "disable_ppo_ratio", bound, "switch one of the two off")
        return
    if loss["sequence_level_ratio_gradient"] == "token" and loss["use_importance_sampling_correction"] is False:
        bound = "force_on_policy_ratio is true: the ratio of a sequence is 1, as that of a token is, and the gradient is that of the token"
        yield _fault(loss, "sequence_level_ratio_gradient", bound, "write sequence_level_importance_ratios: false, and remove this")
    yield from _faults_of_unread_clamp(loss, "force_on_policy_ratio is true: the ratio is 1, and its logarithm 0")


def _faults_of_unread_clamp(loss: ClippedPGLossConfig, reason: str) -> Iterator[Violation]:
    """Yield a clamp of ratios that somebody has chosen; one at its default says nothing."""
    key: Final = "log_ratio_clamp_value"
    if loss[key] != _CLAMPS[key]:
        yield _fault(loss, key, f"{reason}, so that nothing reads it", "remove it")


def _faults_of_cispo(loss: ClippedPGLossConfig) -> Iterator[Violation]:
    if not loss["use_cispo"]:
        return
    if loss["sequence_level_importance_ratios"]:
        bound = "use_cispo is true: its weights are the ratios of tokens (arXiv 2506.13585, equation 4), and none defines it for sequences"
        yield _fault(loss, "sequence_level_importance_ratios", bound, "switch one of the two off")
    if loss["ratio_clip_c"] is not None:
        bound = "use_cispo is true: it bounds no objective, and its weights are bounded by ratio_clip_max whatever the advantage"
        yield _fault(loss, "ratio_clip_c", bound, "write null")


def _faults_of_truncation(loss: ClippedPGLossConfig) -> Iterator[Violation]:
    name: Final = "truncated_importance_sampling_type"
    high: Final = "truncated_importance_sampling_ratio"
    low: Final = "truncated_importance_sampling_ratio_min"
    kind = loss[name]
    if kind is None:
        for key in (high, low):
            if loss[key] is not None:
                yield _fault(loss, key, f"{name} is null, and nothing reads it", f"write {name}: tis, icepop or seq-mask-tis, or null here")
        return
    if loss["use_importance_sampling_correction"] is False:
        bound = "use_importance_sampling_correction is false, and there are no weights to bound"
        yield _fault(loss, name, bound, "write use_importance_sampling_correction: true, or null here")
    if loss[high] is None:
        yield _fault(loss, name, f"{high} is null, and nothing says what the bound is", f"write {high}, for example 2.0, or null here")
    if loss[low] is not None and kind == "tis":
        yield _fault(loss, low, "tis has an upper bound alone, and nothing reads it", f"write null, or {name}: icepop")
    least, most = loss[low], loss[high]
    if least is not None and most is not None and least >= most:
        yield _fault(loss, low, f"it must be less than {high} = {most}, or no weight is left", "write a smaller number, or null")
    if kind == "seq-mask-tis" and loss["sequence_level_importance_ratios"]:
        bound = "sequence_level_importance_ratios is true: with one weight a sequence it is what icepop is"
        yield _fault(loss, name, bound, f"write {name}: icepop")


def _faults_of_means(loss: ClippedPGLossConfig) -> Iterator[Violation]:
    key: Final = "sequence_normalizer"
    if loss[key] is not None and loss["token_level_loss"]:
        bound = "token_level_loss is true: the mean over all tokens has one normaliser, and none of a sequence"
        yield _fault(loss, key, bound, "write token_level_loss: false, or null here")


def _faults_of_divergence(loss: ClippedPGLossConfig) -> Iterator[Violation]:
    if loss[_IN_REWARD]:
        yield from _faults_of_divergence_in_reward(loss)
    elif loss["reference_policy_kl_penalty"] == 0:
        given: Mapping[str, Any] = {**loss, _APPROXIMATION: bool(loss[_APPROXIMATION])}
        for key, default in {_KIND: "k3", _GRADIENT: "exact", _APPROXIMATION: False, **_CLAMPS_OF_DIVERGENCE}.items():
            if given[key] != default:
                bound = "reference_policy_kl_penalty is 0: there is no divergence, and nothing reads it"
                yield _fault(loss, key, bound, "write false" if key == _APPROXIMATION else "remove it, or write a penalty above 0")
    elif loss[_KIND] == "k1" and loss[_GRADIENT] == "pathwise":
        bound = "its own gradient, that of the log-probability, has the expectation 0, so that nothing would hold the policy"
        yield _fault(loss, _KIND, bound, f"write {_GRADIENT}: exact, or another type")
    elif loss[_KIND] == "k2" and loss[_GRADIENT] == "pathwise":
        bound = f"{_KIND} is k2, whose own gradient is that of the divergence already: pathwise would be what exact is"
        yield _fault(loss, _GRADIENT, bound, "remove it, or write another type")


def _faults_of_divergence_in_reward(loss: ClippedPGLossConfig) -> Iterator[Violation]:
    if loss["reference_policy_kl_penalty"] == 0:
        yield _fault(loss, _IN_REWARD, "reference_policy_kl_penalty is 0, so that it would do nothing", "write a penalty, or false here")
    if loss[_KIND] != "k1":
        bound = "use_kl_in_reward is true: only k1 has the gradient of the divergence in a reward, as that of its value is 0 on average"
        yield _fault(loss, _KIND, bound, f"write {_KIND}: k1")
    if loss[_APPROXIMATION]:
        yield _fault(loss, _APPROXIMATION, "use_kl_in_reward is true: no divergence in the loss is weighed", "write false")
    if loss[_GRADIENT] == "pathwise":
        yield _fault(loss, _GRADIENT, "use_kl_in_reward is true: no divergence in the loss has a gradient", "remove it")


def _fault(loss: Mapping[str, Any], key: str, bound: str, fix: str) -> Violation:
    return Violation(f"{SECTION}.{key}", loss[key], bound, fix)
