"""Sampling seeds, and metrics of the mismatch between the engine's and the policy's log-probabilities."""

from __future__ import annotations

import torch
from torch import Tensor

from megarl.errors import MismatchError
from megarl.models.generation.sampling import seed_of
from megarl.observe.metrics import FAR, MISMATCH_MAX, MISMATCH_MEAN, MISMATCH_SHARE


def sampling_seed(run_seed: int, step: int, prompt_index: int, sample_index: int) -> int:
    """Return the seed of one response, in [0, 2**63). It is a hash of the arguments, so a resumed run, or a
    run with another layout, samples the same response."""
    return seed_of(f"{run_seed}:{step}:{prompt_index}:{sample_index}")


def sampling_seeds(run_seed: int, step: int, num_prompts: int, num_generations: int) -> list[int]:
    """Return a seed for each response of a step, with those for the same prompt adjacent. A seed depends on
    the position of the prompt in the step, not on its text."""
    return seeds_from(run_seed, (step - 1) * num_prompts, num_prompts, num_generations, num_prompts)


def seeds_from(
    run_seed: int, ordinal: int, num_prompts: int, num_generations: int, prompts_per_step: int
) -> list[int]:
    """Return the seeds of the responses to consecutive prompts, with those for the same prompt adjacent. A
    prompt is identified by its ordinal in the run.

    If each step uses ``prompts_per_step`` prompts and none is dropped, these are the seeds of
    ``sampling_seeds``.

    Args:
        run_seed: seed of the run.
        ordinal: number of prompts in the run before the first of these.
        num_prompts, num_generations: number of prompts, and of responses per prompt.
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
    """Return the seeds of the responses to a validation set, with those for the same prompt adjacent.

    They depend only on the set's name and the positions of prompt and response. So every validation of every
    run uses the same seeds, and ``megarl eval`` reproduces the metrics of a training step.
    """
    return [
        seed_of(f"validation:{name}:{prompt}:{sample}")
        for prompt in range(num_prompts)
        for sample in range(num_generations)
    ]


def seed_of_turn(seed: int, turn: int) -> int:
    """Derive the seed of a conversation's later response, in [0, 2**63), from the seed of the first."""
    return seed_of(f"{seed}:{turn}")


MODEL_INPUTS = ("input_ids", "input_lengths", "token_mask", "sample_mask")
"""Batch columns that a model needs to compute log-probabilities or to train."""

TOKEN_MULT_PROB_ERROR = "token_mult_prob_error"


def mismatch_metrics(generation: Tensor, policy: Tensor, mask: Tensor) -> dict[str, float]:
    """Compare two log-probabilities of each token: the engine's and the policy's.

    Args:
        generation: [B, S] float, log-probabilities from sampling.
        policy: [B, S] float, log-probabilities under the policy before its update.
        mask: [B, S], nonzero on the tokens to compare.

    Returns:
        ``mismatch_mean`` and ``mismatch_max`` of the absolute difference; ``mismatch_share_above_0.05``, the
        share of tokens with a larger difference; and ``token_mult_prob_error``, the mean of
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
    """Return the effective sample size of importance weights divided by their number: (sum w)^2 / (n sum
    w^2). 1 if there are no weights.

    Args:
        log_weights: [B, S] float, log importance weights.
        mask: [B, S], nonzero on the tokens that count.
    """
    counted = log_weights[mask != 0].double()
    if not len(counted):
        return 1.0
    # Subtract the maximum, so that no weight overflows.
    weights = (counted - counted.max()).exp()
    return float(weights.sum() ** 2 / (len(weights) * (weights**2).sum()))


def row_mismatch(generation: Tensor, policy: Tensor, mask: Tensor) -> Tensor:
    """Return each row's mean absolute difference between two log-probabilities of its tokens.

    Args:
        generation, policy, mask: see ``mismatch_metrics``.

    Returns:
        [B] float64; infinite if a difference is NaN, and NaN for a row without tokens.
    """
    counted = mask != 0
    difference = torch.where(counted, _differences(generation, policy), 0.0)
    return difference.sum(1) / counted.sum(1)


def _differences(generation: Tensor, policy: Tensor) -> Tensor:
    """Return the absolute differences in float64, with NaN replaced by infinity."""
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
    """Mask the sequences whose generation and training log-probabilities differ too much.

    Args:
        generation, policy: [B, S] float, see ``mismatch_metrics``.
        token_mask: [B, S].
        sample_mask: [B].
        threshold: maximum mean over a sequence's tokens of exp(|difference|); a NaN difference counts as
            infinite.
        step, section: number of the step and name of the configuration section, for the error message.

    Returns:
        The new sample mask [B], and metrics: ``num_masked_seqs_by_logprob_error``, and
        ``max_seq_mult_prob_error`` over all sequences that counted before.

    Raises:
        MismatchError: no sequence is left.
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
    """Check that generation and training log-probabilities agree well enough to train on the responses.

    Raises:
        MismatchError: ``token_mult_prob_error`` is above ``bound``.
    """
    error = metrics[TOKEN_MULT_PROB_ERROR]
    # ``not <=`` instead of ``>`` also rejects NaN.
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
