"""Token segments of conversations, and the batch that is built from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from megarl.distributed.batched_data_dict import BatchedDataDict
from megarl.distributed.parcels import inside
from megarl.distributed.token_batches import pad_arrays, padded
from megarl.distributed.token_rows import TokenRows

TOKEN_VERSIONS = "token_versions"
"""Batch column of weight versions per token, see ``batch_of``."""


@dataclass(slots=True)
class Segment:
    """A token sequence as the model sees it: a prompt, then alternately sampled and observed tokens.

    Sampled tokens are never decoded and encoded again: the next prompt is all tokens so far plus those of the
    observation.

    A conversation is one segment unless the prompt of a later turn does not start with the tokens so far, for
    example because the chat template drops the reasoning of earlier responses. A new segment starts then.

    Attributes:
        prompt: [P] int64.
        pieces: runs of tokens [n] int64, each with the sampling log-probabilities [n] float32 and the weight
            versions [n] int64. Both are None for observed tokens; versions are also None if the engine does
            not report them.
        rewards: one reward per response. The reward of the complete conversation is added to the last one.
        opening: number of tokens at the end of the prompt that are an observation; 0 in a first segment.
        length, sampled_length: number of tokens after the prompt, and of the sampled ones among them.
    """

    prompt: np.ndarray
    pieces: list[tuple[np.ndarray, np.ndarray | None, np.ndarray | None]] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    opening: int = 0
    length: int = field(default=0, init=False)
    sampled_length: int = field(default=0, init=False)

    def sampled(self, tokens: np.ndarray, logprobs: np.ndarray, versions: np.ndarray | None = None) -> None:
        """Append sampled tokens with their log-probabilities and weight versions."""
        self.pieces.append((tokens, logprobs, versions))
        self.rewards.append(0.0)
        self.length += len(tokens)
        self.sampled_length += len(tokens)

    def observed(self, tokens: np.ndarray) -> None:
        """Append tokens of an observation."""
        self.pieces.append((tokens, None, None))
        self.length += len(tokens)

    @property
    def tokens(self) -> np.ndarray:
        """All tokens including the prompt, [n] int64."""
        if not self.pieces:
            return self.prompt
        return np.concatenate([self.prompt, *[piece[0] for piece in self.pieces]])

    def __len__(self) -> int:
        return len(self.prompt) + self.length

    @property
    def last_token(self) -> int | None:
        """The last token, or None if the last appended run of tokens is empty."""
        tokens = self.pieces[-1][0] if self.pieces else self.prompt
        return int(tokens[-1]) if len(tokens) else None


def batch_of(segments: Sequence[Segment], pad_token_id: int) -> BatchedDataDict[Any]:
    """Build a batch with one row per segment.

    Returns:
        A batch with these columns:

        * ``input_ids`` [B, S] int64, right-padded; ``input_lengths`` [B] int64;
        * ``token_mask`` [B, S] float: 1 on sampled tokens;
        * ``sample_mask`` [B] float: 0 if nothing was sampled;
        * ``generation_logprobs`` [B, S] float32: 0 except on sampled tokens;
        * ``generation_lengths`` [B] int64: number of sampled tokens;
        * ``prompt_ids`` [B, longest prompt] int64; ``prompt_lengths`` [B] int64;
        * ``token_versions`` [B, S] int64, weight versions, 0 except on sampled tokens: only if the engine
          reports them.
    """
    prompt_ids, prompt_lengths = pad_arrays([segment.prompt for segment in segments], pad_token_id)
    # Alternate observed and sampled pieces of all segments, one segment after another.
    tokens, are_sampled = list[np.ndarray](), list[bool]()
    of_sampled, versions = list[np.ndarray](), list[np.ndarray]()
    for segment in segments:
        for piece, logprobs, piece_versions in ((segment.prompt, None, None), *segment.pieces):
            tokens.append(piece)
            are_sampled.append(logprobs is not None)
            if logprobs is not None:
                of_sampled.append(logprobs)
            if piece_versions is not None:
                versions.append(piece_versions)
    rows = TokenRows(np.concatenate(tokens), np.fromiter(map(len, segments), np.int64, len(segments)))
    input_ids, lengths = padded(rows, pad_token_id)
    is_sampled = np.repeat(are_sampled, list(map(len, tokens)))
    # Use versions only if every piece has them: a piece without them would shift those of all later pieces.
    tells = len(versions) == len(of_sampled) > 0
    token_mask = np.zeros(input_ids.shape, np.float32)
    generation_logprobs = np.zeros_like(token_mask)
    token_mask[inside(0, lengths.numpy(), input_ids.shape[1])] = is_sampled
    counts = token_mask != 0
    generation_logprobs[counts] = np.concatenate(of_sampled) if of_sampled else 0
    sampled_lengths = counts.sum(axis=1)
    token_versions = np.zeros(input_ids.shape, np.int64)
    if tells:
        token_versions[counts] = np.concatenate(versions)
    return BatchedDataDict(
        {
            "input_ids": input_ids,
            "input_lengths": lengths,
            "token_mask": torch.from_numpy(token_mask),
            "sample_mask": torch.from_numpy((sampled_lengths > 0).astype(np.float32)),
            "generation_logprobs": torch.from_numpy(generation_logprobs),
            "generation_lengths": torch.from_numpy(sampled_lengths),
            "prompt_ids": prompt_ids,
            "prompt_lengths": prompt_lengths,
            **({TOKEN_VERSIONS: torch.from_numpy(token_versions)} if tells else {}),
        }
    )


def token_rewards(segments: Sequence[Segment], width: int) -> torch.Tensor:
    """Return a [B, width] float32 tensor with each response's reward at its last token, and 0 elsewhere. The
    reward of an empty response is dropped."""
    found = np.zeros((len(segments), width), np.float32)
    for row, segment in enumerate(segments):
        rewards, end = iter(segment.rewards), len(segment.prompt)
        for tokens, logprobs, _ in segment.pieces:
            end += len(tokens)
            if logprobs is not None and (reward := next(rewards)) and len(tokens):
                found[row, end - 1] = reward
    return torch.from_numpy(found)
