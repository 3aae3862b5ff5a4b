"""Rollouts: answers to prompts, drawn from the policy, ready to be rewarded and trained on."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from megarl.distributed.batched_data_dict import BatchedDataDict
from megarl.distributed.token_batches import TokenRows, pad_rows, span_mask
from megarl.errors import BatchError, MismatchError
from megarl.observe.metrics import FAR, MISMATCH_MAX, MISMATCH_MEAN, MISMATCH_SHARE
from megarl.rollout.texts import response_texts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from megarl.models.generation.interfaces import GenerationInterface, Sampling


def sampling_seed(run_seed: int, step: int, prompt_index: int, sample_index: int) -> int:
    """The seed of one answer's random numbers, in [0, 2**63).

    A hash of its arguments, so that a resumed run, or one with other workers, draws the same answer.
    """
    return _seed_of(f"{run_seed}:{step}:{prompt_index}:{sample_index}")


def sampling_seeds(run_seed: int, step: int, num_prompts: int, num_generations: int) -> list[int]:
    """The seeds of a step's answers, in the order of ``generate_samples``; a prompt counts by its place in the step."""
    return [sampling_seed(run_seed, step, prompt, sample) for prompt in range(num_prompts) for sample in range(num_generations)]


def seeds_from(run_seed: int, ordinal: int, num_prompts: int, num_generations: int, prompts_per_step: int) -> list[int]:
    """The seeds of the answers to consecutive prompts, in the order of ``generate_samples``; a prompt counts by its ordinal in the run.

    Where every step takes ``prompts_per_step`` prompts, and none is left out, these are the seeds of ``sampling_seeds``.

    Args:
        run_seed: of the run.
        ordinal: prompts that came before the first of these.
        num_prompts, num_generations: prompts, and answers to each.
        prompts_per_step: prompts that a step trains on.
    """
    places = [divmod(ordinal + prompt, prompts_per_step) for prompt in range(num_prompts)]
    return [sampling_seed(run_seed, step + 1, place, sample) for step, place in places for sample in range(num_generations)]


def validation_seeds(name: str, num_prompts: int, num_generations: int) -> list[int]:
    """The seeds of the answers to a validation set, in the order of ``generate_samples``.

    They depend on the name of the set and the places of prompt and answer alone, so that every validation of every run draws alike and
    ``megarl eval`` finds the figures of a step again.
    """
    return [_seed_of(f"validation:{name}:{prompt}:{sample}") for prompt in range(num_prompts) for sample in range(num_generations)]


def _seed_of(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def generate_samples(
    policy: GenerationInterface,
    prompts: Sequence[Sequence[int]],
    tokenizer: PreTrainedTokenizerBase,
    num_generations: int = 1,
    seeds: Sequence[int] | None = None,
    greedy: bool = False,
    stop_token_ids: Sequence[int] | None = None,
    sampling: Sampling | None = None,
) -> BatchedDataDict[Any]:
    """Answers to prompts.

    Args:
        policy: whatever generates.
        prompts: P rows of token ids.
        tokenizer: decodes, and gives the pad and end-of-sequence tokens.
        num_generations: G, answers a prompt.
        seeds: B = P * G sampling seeds, or None where the policy may draw as it likes.
        greedy: take the likeliest token always.
        stop_token_ids: tokens that end an answer; the end-of-sequence token when None.
        sampling: in place of the configured temperature, top-p and top-k; None for those.

    Returns:
        B rows, the answers to one prompt next to each other: ``input_ids`` [B, S] int64 (prompt and answer), ``input_lengths`` [B],
        ``token_mask`` [B, S] float (1 on the answer's tokens, its end token among them), ``sample_mask`` [B] float (0 for an answer without
        tokens), ``generation_logprobs`` [B, S] float32, ``generation_lengths`` [B], ``truncated`` [B] bool (the answer met a length limit,
        not a stop), ``prompt_ids`` [B, longest prompt] int64, ``prompt_lengths`` [B], ``response_text`` (B texts, what rewards
        read of the responses, see ``response_texts``).

    Raises:
        BatchError: the numbers of seeds and rows differ, or the policy's answer does not fit the prompts.
    """
    rows = len(prompts) * num_generations
    prompt_ids, prompt_lengths = (column.repeat_interleave(num_generations, dim=0) for column in pad_rows(prompts, tokenizer.pad_token_id))
    request: BatchedDataDict[Any] = BatchedDataDict({"input_ids": prompt_ids, "input_lengths": prompt_lengths})
    if seeds is not None:
        if len(seeds) != rows:
            raise BatchError(f"{len(seeds)} sampling seeds for {rows} samples. Fix: pass one seed for each prompt and generation")
        request["sampling_seeds"] = torch.tensor(list(seeds), dtype=torch.int64)
    # a generator without that parameter serves where nobody asks for another distribution
    output = policy.generate(request, greedy=greedy, **({} if sampling is None else {"sampling": sampling}))

    input_ids, lengths = output["output_ids"], output["unpadded_sequence_lengths"].long()
    _check_answers(input_ids, lengths, output["generation_lengths"], prompt_ids, prompt_lengths)
    answers = TokenRows(input_ids.numpy(), prompt_lengths.numpy(), lengths.numpy())
    stops = set(stop_token_ids) if stop_token_ids is not None else {tokenizer.eos_token_id}
    return BatchedDataDict(
        {
            "input_ids": input_ids,
            "input_lengths": lengths,
            "token_mask": span_mask(prompt_lengths, lengths, input_ids.shape[1]),
            "sample_mask": (output["generation_lengths"] > 0).float(),
            "generation_logprobs": output["logprobs"],
            "generation_lengths": output["generation_lengths"],
            "truncated": _truncated(output, answers, stops),
            "prompt_ids": prompt_ids,
            "prompt_lengths": prompt_lengths,
            "response_text": response_texts(tokenizer, answers),
        }
    )


def _check_answers(input_ids: Tensor, lengths: Tensor, new_lengths: Tensor, prompt_ids: Tensor, prompt_lengths: Tensor) -> None:
    """Refuse an output whose rows are not those of the prompts, in their order."""
    width = prompt_ids.shape[1]
    fits = input_ids.shape[0] == prompt_ids.shape[0] and torch.equal(lengths, prompt_lengths + new_lengths) and input_ids.shape[1] >= width
    if fits:
        outside = torch.arange(width) >= prompt_lengths.unsqueeze(1)
        fits = bool(((input_ids[:, :width] == prompt_ids) | outside).all())
    if not fits:
        raise BatchError(
            f"generated rows {list(input_ids.shape)} with {lengths.tolist()[:8]} tokens, {new_lengths.tolist()[:8]} of them new, "
            f"do not continue the {prompt_ids.shape[0]} prompts of {prompt_lengths.tolist()[:8]} tokens row by row. "
            "Fix: the generator must keep the order of the rows and start each with its prompt"
        )


def _truncated(output: BatchedDataDict[Any], answers: TokenRows, stops: set[int]) -> Tensor:
    """[B] bool. A generator that knows better, because it stops at texts too, says so under ``truncated``."""
    if "truncated" in output:
        return output["truncated"].bool()
    # no token has the id -1, so that an answer without tokens has none of the stops either
    return torch.from_numpy(~np.isin(answers.last(without=-1), list(stops)))


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
        Over these tokens: ``mismatch_mean`` and ``mismatch_max`` of the absolute difference, ``mismatch_share_above_0.05`` of the tokens,
        and ``token_mult_prob_error``, the mean of exp(|difference|). A difference that is not a number is counted as infinite. Without
        any token 0, 0, 0 and 1.
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
    generation: Tensor, policy: Tensor, token_mask: Tensor, sample_mask: Tensor, threshold: float, step: int, section: str = "grpo"
) -> tuple[Tensor, dict[str, float]]:
    """A sample mask without the sequences whose log-probabilities of generation and training are too far apart.

    Args:
        generation, policy: [B, S] float, as for ``mismatch_metrics``.
        token_mask: [B, S].
        sample_mask: [B].
        threshold: of a sequence's mean over tokens of exp(|difference|), where what is not a number counts as infinite.
        step, section: of the run, and with its bounds, for the message.

    Returns:
        (mask [B], metrics): ``num_masked_seqs_by_logprob_error``, and ``max_seq_mult_prob_error`` of all sequences that counted.

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
            f"step {step}: all {counted} sequences are above {section}.seq_logprob_error_threshold = {threshold:g}, the nearest with "
            f"{float(of_sequences[far].min()):.4g}, so that nothing is left to train on. Fix: compare the precision of the engine with "
            "policy.precision, and its log-probabilities with those of transformers on the exported model; raise the threshold only if "
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
    if bound is not None and not error <= bound:
        raise MismatchError(
            f"step {step}: {TOKEN_MULT_PROB_ERROR} = {error:.4g} is above {section}.max_token_mult_prob_error = {bound:g}; the "
            f"log-probabilities of generation and training differ by {metrics[MISMATCH_MEAN]:.3g} on average, by more than {FAR} for "
            f"{metrics[MISMATCH_SHARE]:.1%} of the tokens. Nothing was trained on these answers. Fix: compare the precision "
            "of the engine with policy.precision, and its log-probabilities with those of transformers on the exported model; raise the "
            "bound only if the difference is understood"
        )
