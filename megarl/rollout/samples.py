"""Seeds of samples, and how far the log-probabilities of engine and policy are apart on them."""

from __future__ import annotations

import torch
from torch import Tensor

from megarl.errors import MismatchError
from megarl.models.generation.sampling import seed_of
from megarl.observe.metrics import FAR, MISMATCH_MAX, MISMATCH_MEAN, MISMATCH_SHARE


def sampling_seed(run_seed: int, step: int, prompt_index: int, sample_index: int) -> int:
    """The seed of one answer's random numbers, in [0, 2**63).

    A hash of its arguments, so that a resumed run, or one with other workers, draws the same answer.
    """
    return seed_of(f"{run_seed}:{step}:{prompt_index}:{sample_index}")


def sampling_seeds(run_seed: int, step: int, num_prompts: int, num_generations: int) -> list[int]:
    """The seeds of a step's answers, those of one prompt next to each other; a prompt counts by its place in
    the step."""
    return [
        sampling_seed(run_seed, step, prompt, sample)
        for prompt in range(num_prompts)
        for sample in range(num_generations)
    ]


def seeds_from(
    run_seed: int, ordinal: int, num_prompts: int, num_generations: int, prompts_per_step: int
) -> list[int]:
    """The seeds of the answers to consecutive prompts, those of one prompt next to each other; a prompt
    counts by its ordinal in the run.

    Where every step takes ``prompts_per_step`` prompts, and none is left out, these are the seeds of
    ``sampling_seeds``.

    Args:
        run_seed: of the run.
        ordinal: prompts that came before the first of these.
        num_prompts, num_generations: prompts, and answers to each.
        prompts_per_step: prompts that a step trains on.
    """
    places = [divmod(ordinal + prompt, prompts_per_step) for prompt in range(num_prompts)]
    return [
        # Steps count from 1.
        sampling_seed(run_seed, step + 1, place, sample)
        for step, place in places
        for sample in range(num_generations)
    ]


def validation_seeds(name: str, num_prompts: int, num_generations: int) -> list[int]:
    """The seeds of the answers to a validation set, those of one prompt next to each other.

    They depend on the name of the set and the places of prompt and answer alone, so that every validation of
    every run draws alike and ``megarl eval`` finds the figures of a step again.
    """
    return [
        seed_of(f"validation:{name}:{prompt}:{sample}")
        for prompt in range(num_prompts)
        for sample in range(num_generations)
    ]


def seed_of_turn(seed: int, turn: int) -> int:
    """The seed of a later response of a conversation, in [0, 2**63); that of the first one is
    ``sampling_seed``."""
    return seed_of(f"{seed}:{turn}")


MODEL_INPUTS = ("input_ids", "input_lengths", "token_mask", "sample_mask")
"""Columns of samples that a model needs to score or train on them."""

TOKEN_MULT_PROB_ERROR = "token_mult_prob_error"


def mismatch_metrics(generation: Tensor, policy: Tensor, mask: Tensor) -> dict[str, float]:
    """The difference of two log-probabilities of each token.

    Args:
        generation: [B, S] float, where the tokens were drawn.
        policy: [B, S] float, of the policy before its update.
        mask: [B, S], not 0 on the tokens that count.

    Returns:
        Over these tokens: ``mismatch_mean`` and ``mismatch_max`` of the absolute difference,
        ``mismatch_share_above_0.05`` of the tokens, and ``token_mult_prob_error``, the mean of
        exp(|difference|). A difference that is not a number is counted as infinite. Without any token 0, 0, 0
        and 1.
    """
    counted = mask.reshape(-1).nonzero().squeeze(1)
    difference = _differences(generation.reshape(-1)[counted], policy.reshape(-1)[counted])
    if difference.numel() == 0:
        return {MISMATCH_MEAN: 0.0, MISMATCH_MAX: 0.0, MISMATCH_SHARE: 0.0, TOKEN_MULT_PROB_ERROR: 1.0}
    return {
        MISMATCH_MEAN: float(difference.mean()),
        MISMATCH_MAX: float(difference.max()),
        MISMATCH_SHARE: float((difference > FAR).double().mean()),
        TOKEN_MULT_PROB_ERROR: float(difference.exp().mean()),
    }


def effective_share(log_weights: Tensor, mask: Tensor) -> float:
    """The effective sample size of importance weights as a share of their number, (sum w)^2 / (n sum w^2); 1
    of none.

    Args:
        log_weights: [B, S] float, logarithms of the weights.
        mask: [B, S], not 0 on the tokens that count.
    """
    counted = log_weights[mask != 0].double()
    if not len(counted):
        return 1.0
    # the largest is 1, so that none overflows
    weights = (counted - counted.max()).exp()
    return float(weights.sum() ** 2 / (len(weights) * (weights**2).sum()))


def row_mismatch(generation: Tensor, policy: Tensor, mask: Tensor) -> Tensor:
    """The mean absolute difference of two log-probabilities over the tokens of each row.

    Args:
        generation, policy, mask: as of ``mismatch_metrics``.

    Returns:
        [B] float64; infinite where a difference is not a number, NaN for a row without any token.
    """
    counted = mask != 0
    difference = torch.where(counted, _differences(generation, policy), 0.0)
    return difference.sum(1) / counted.sum(1)


def _differences(generation: Tensor, policy: Tensor) -> Tensor:
    """Absolute differences in float64; one that is not a number counts as infinite."""
    difference = (generation.double() - policy.double()).abs()
    return torch.where(difference.isnan(), torch.inf, difference)


def masked_far_apart(
    generation: Tensor,
    policy: Tensor,
    token_mask: Tensor,
    sample_mask: Tensor,
    threshold: float,
    step: int,
    section: str = "grpo",
) -> tuple[Tensor, dict[str, float]]:
    """A sample mask without the sequences whose log-probabilities of generation and training are too far
    apart.

    Args:
        generation, policy: [B, S] float, as for ``mismatch_metrics``.
        token_mask: [B, S].
        sample_mask: [B].
        threshold: of a sequence's mean over tokens of exp(|difference|), where what is not a number counts as
            infinite.
        step, section: of the run, and with its bounds, for the message.

    Returns:
        (mask [B], metrics): ``num_masked_seqs_by_logprob_error``, and ``max_seq_mult_prob_error`` of all
        sequences that counted.

    Raises:
        MismatchError: no sequence that counted is left.
    """
    counts = (token_mask != 0) & (sample_mask != 0).unsqueeze(1)
    errors = torch.where(counts, _differences(generation, policy).exp(), 0.0)
    of_sequences = errors.sum(dim=1) / counts.sum(dim=1).clamp(min=1)
    far = of_sequences > threshold
    counted = int(counts.any(dim=1).sum())
    if counted and int(far.sum()) == counted:
        raise MismatchError(
            f"step {step}: all {counted} sequences are above {section}.seq_logprob_error_threshold = "
            f"{threshold:g}, the nearest with "
            f"{float(of_sequences[far].min()):.4g}, so that nothing is left to train on. Fix: compare the "
            "precision of the engine with "
            "policy.precision, and its log-probabilities with those of transformers on the exported model; "
            "raise the threshold only if "
            "the difference is understood"
        )
    worst = float(of_sequences.max()) if counted else 1.0
    return sample_mask * (~far).to(sample_mask.dtype), {
        "num_masked_seqs_by_logprob_error": float(far.sum()),
        "max_seq_mult_prob_error": worst,
    }


def check_mismatch(metrics: dict[str, float], bound: float | None, step: int, section: str = "grpo") -> None:
    """Refuse to train on answers that another policy seems to have given.

    Raises:
        MismatchError: ``token_mult_prob_error`` is above the bound.
    """
    error = metrics[TOKEN_MULT_PROB_ERROR]
    # ``not <=`` and no ``>``, so that NaN is refused too.
    if bound is not None and not error <= bound:
        raise MismatchError(
            f"step {step}: {TOKEN_MULT_PROB_ERROR} = {error:.4g} is above "
            f"{section}.max_token_mult_prob_error = {bound:g}; the "
            f"log-probabilities of generation and training differ by {metrics[MISMATCH_MEAN]:.3g} on "
            f"average, by more than {FAR} for "
            f"{metrics[MISMATCH_SHARE]:.1%} of the tokens. Nothing was trained on these answers. Fix: "
            "compare the precision "
            "of the engine with policy.precision, and its log-probabilities with those of transformers on "
            "the exported model; raise the "
            "bound only if the difference is understood"
        )
