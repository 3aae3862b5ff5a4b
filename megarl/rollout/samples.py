"""Seeds of samples, and the difference between the log-probabilities of engine and policy on samples."""

from __future__ import annotations

import torch
from torch import Tensor

from megarl.errors import MismatchError
from megarl.models.generation.sampling import seed_of
from megarl.observe.metrics import FAR, MISMATCH_MAX, MISMATCH_MEAN, MISMATCH_SHARE


def sampling_seed(run_seed: int, step: int, prompt_index: int, sample_index: int) -> int:
    """Return the random seed of one response, in [0, 2**63).

    It is a hash of the arguments, so that a resumed run, or one with other workers, samples the same
    response.
    """
    return seed_of(f"{run_seed}:{step}:{prompt_index}:{sample_index}")


def sampling_seeds(run_seed: int, step: int, num_prompts: int, num_generations: int) -> list[int]:
    """Return the seeds of a step's responses, those of one prompt next to each other. A prompt is identified
    by its position in the step."""
    return seeds_from(run_seed, (step - 1) * num_prompts, num_prompts, num_generations, num_prompts)


def seeds_from(
    run_seed: int, ordinal: int, num_prompts: int, num_generations: int, prompts_per_step: int
) -> list[int]:
    """Return the seeds of the responses to consecutive prompts, those of one prompt next to each other. A
    prompt is identified by its ordinal in the run.

    If every step takes ``prompts_per_step`` prompts, and none is left out, these are the seeds of
    ``sampling_seeds``.

    Args:
        run_seed: seed of the run.
        ordinal: number of prompts before the first of these.
        num_prompts, num_generations: number of prompts, and of responses to each.
        prompts_per_step: number of prompts that a step trains on.
    """
    seeds: list[int] = []
    for number in range(ordinal, ordinal + num_prompts):
        step, prompt = divmod(number, prompts_per_step)
        for sample in range(num_generations):
            # Steps count from 1.
            seeds.append(sampling_seed(run_seed, step + 1, prompt, sample))
    return seeds


def validation_seeds(name: str, num_prompts: int, num_generations: int) -> list[int]:
    """Return the seeds of the responses to a validation set, those of one prompt next to each other.

    They depend only on the name of the set and the positions of prompt and response, so that every validation
    of every run samples with the same seeds, and ``megarl eval`` reproduces the metrics of a step.
    """
    return [
        seed_of(f"validation:{name}:{prompt}:{sample}")
        for prompt in range(num_prompts)
        for sample in range(num_generations)
    ]


def seed_of_turn(seed: int, turn: int) -> int:
    """Return the seed of a later response of a conversation, in [0, 2**63), from the seed of its first one,
    which is ``sampling_seed``."""
    return seed_of(f"{seed}:{turn}")


MODEL_INPUTS = ("input_ids", "input_lengths", "token_mask", "sample_mask")
"""Columns of samples that a model needs to score samples or train on them."""

TOKEN_MULT_PROB_ERROR = "token_mult_prob_error"


def mismatch_metrics(generation: Tensor, policy: Tensor, mask: Tensor) -> dict[str, float]:
    """Compute metrics of the difference between two log-probabilities of each token.

    Args:
        generation: [B, S] float, log-probabilities from sampling.
        policy: [B, S] float, log-probabilities of the policy before its update.
        mask: [B, S], nonzero on the tokens that count.

    Returns:
        Over these tokens: ``mismatch_mean`` and ``mismatch_max`` of the absolute difference,
        ``mismatch_share_above_0.05`` of the tokens, and ``token_mult_prob_error``, the mean of
        exp(|difference|). A NaN difference counts as infinite. Without any token the values are 0, 0, 0 and
        1.
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
    """Return the effective sample size of importance weights as a share of their number, (sum w)^2 / (n sum
    w^2), or 1 if there are no weights.

    Args:
        log_weights: [B, S] float, logarithms of the weights.
        mask: [B, S], nonzero on the tokens that count.
    """
    counted = log_weights[mask != 0].double()
    if not len(counted):
        return 1.0
    # Subtract the largest value, so that every weight is at most 1 and none overflows.
    weights = (counted - counted.max()).exp()
    return float(weights.sum() ** 2 / (len(weights) * (weights**2).sum()))


def row_mismatch(generation: Tensor, policy: Tensor, mask: Tensor) -> Tensor:
    """Return the mean absolute difference between two log-probabilities over the tokens of each row.

    Args:
        generation, policy, mask: as for ``mismatch_metrics``.

    Returns:
        [B] float64; infinite if a difference is NaN, and NaN for a row without any token.
    """
    counted = mask != 0
    difference = torch.where(counted, _differences(generation, policy), 0.0)
    return difference.sum(1) / counted.sum(1)


def _differences(generation: Tensor, policy: Tensor) -> Tensor:
    """Return absolute differences in float64; a NaN difference becomes infinite."""
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
    """Return a sample mask without the sequences whose log-probabilities from generation and training differ
    too much.

    Args:
        generation, policy: [B, S] float, as for ``mismatch_metrics``.
        token_mask: [B, S].
        sample_mask: [B].
        threshold: maximum of a sequence's mean over tokens of exp(|difference|); a NaN difference counts as
            infinite.
        step, section: step of the run, and section with the threshold, for the error message.

    Returns:
        (mask [B], metrics): ``num_masked_seqs_by_logprob_error``, and ``max_seq_mult_prob_error`` over all
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
            f"step {step}: all {counted} sequences are above {section}.seq_logprob_error_threshold "
            f"= {threshold:g}, the lowest with {float(of_sequences[far].min()):.4g}, so nothing is "
            "left to train on. Fix: compare the precision of the engine with policy.precision, "
            "and its log-probabilities with those of transformers on the exported model; raise "
            "the threshold only if the difference is understood"
        )
    worst = float(of_sequences.max()) if counted else 1.0
    return sample_mask * (~far).to(sample_mask.dtype), {
        "num_masked_seqs_by_logprob_error": float(far.sum()),
        "max_seq_mult_prob_error": worst,
    }


def check_mismatch(metrics: dict[str, float], bound: float | None, step: int, section: str = "grpo") -> None:
    """Refuse to train on responses that seem to come from a different policy.

    Raises:
        MismatchError: ``token_mult_prob_error`` is above the bound.
    """
    error = metrics[TOKEN_MULT_PROB_ERROR]
    # Write ``not <=`` instead of ``>``, so that NaN is refused too.
    if bound is not None and not error <= bound:
        raise MismatchError(
            f"step {step}: {TOKEN_MULT_PROB_ERROR} = {error:.4g} is above "
            f"{section}.max_token_mult_prob_error = {bound:g}; the "
            f"log-probabilities of generation and training differ by {metrics[MISMATCH_MEAN]:.3g} on "
            f"average, by more than {FAR} for "
            f"{metrics[MISMATCH_SHARE]:.1%} of the tokens. Nothing was trained on these responses. Fix: "
            "compare the precision "
            "of the engine with policy.precision, and its log-probabilities with those of transformers on "
            "the exported model; raise the "
            "bound only if the difference is understood"
        )
