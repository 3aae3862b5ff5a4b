"""Batches for distributed tests: uneven lengths, masked tokens, one dropped sample."""

from __future__ import annotations

import torch

from tests.models import VOCABULARY


def make_batch(rows: int = 8, length: int = 13, seed: int = 0) -> dict[str, torch.Tensor]:
    """A batch of the contract with everything that any loss needs."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(3, length + 1, (rows,), generator=generator)
    lengths[0] = length
    inside = torch.arange(length)[None] < lengths[:, None]
    ids = torch.randint(3, VOCABULARY, (rows, length), generator=generator) * inside
    token_mask = (torch.rand(rows, length, generator=generator) < 0.7) & inside
    sample_mask = torch.ones(rows)
    sample_mask[rows // 2] = 0.0
    noise = lambda: -torch.rand(rows, length, generator=generator) * 3 * inside  # noqa: E731
    return {
        "input_ids": ids,
        "input_lengths": lengths,
        "token_mask": token_mask.float(),
        "sample_mask": sample_mask,
        "advantages": torch.randn(rows, 1, generator=generator).expand(rows, length).contiguous() * inside,
        "prev_logprobs": noise(),
        "generation_logprobs": noise(),
        "reference_policy_logprobs": noise(),
    }
