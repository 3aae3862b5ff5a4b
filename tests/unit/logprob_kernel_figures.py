"""What Triton's interpreter finds of the kernels of log-probabilities, as JSON.

``TRITON_INTERPRET=1 MEGARL_LOGPROB_KERNEL=1 python -m tests.unit.logprob_kernel_figures``: a process of its
own, because Triton decides at its import whether it interprets.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

import torch
from torch import Tensor

from megarl.models.engine import logprob_kernels, logprobs
from megarl.models.engine.logprobs import (
    SoftmaxSums,
    VocabularyShard,
    vocab_parallel_scores,
)
from megarl.models.generation.sampling import SamplingSettings
from megarl.patched import patched
from tests.kept_tokens import _kept
from tests.unit.logit_passes import VARIANTS, passes_of_kernels

BLOCK = logprob_kernels.LARGEST_BLOCK


def cases() -> Iterator[tuple[str, Tensor, Tensor, SamplingSettings, int]]:
    """Name, logits, targets, sampling, and how many ranks share the vocabulary."""
    generator = torch.Generator().manual_seed(5)
    some = SamplingSettings(temperature=0.7, top_k=7, top_p=0.8)

    def drawn(tokens: int, vocabulary: int, scale: float = 3.0) -> Tensor:
        return torch.randn(tokens, vocabulary, generator=generator) * scale

    def targets(tokens: int, vocabulary: int) -> Tensor:
        return torch.randint(vocabulary, (tokens,), generator=generator)

    for vocabulary in (1, 2, 63, 64, 65, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 77):
        yield (
            f"vocabulary of {vocabulary}",
            drawn(3, vocabulary),
            targets(3, vocabulary),
            SamplingSettings(),
            1,
        )
    yield "one token", drawn(1, 501), targets(1, 501), SamplingSettings(temperature=2), 1
    yield "no tokens", drawn(0, 501), targets(0, 501), SamplingSettings(), 1
    for dtype in (torch.bfloat16, torch.float16):
        yield (
            str(dtype),
            drawn(4, BLOCK + 9, 8.0).to(dtype),
            targets(4, BLOCK + 9),
            SamplingSettings(temperature=0.7),
            1,
        )
    yield "ties", torch.zeros(3, BLOCK + 5), targets(3, BLOCK + 5), SamplingSettings(), 1
    yield (
        "ties at the edge of what is kept",
        torch.tensor([[2.0, 1, 1, 1, 0], [1, 1, 1, 1, 1]]),
        torch.tensor([2, 4]),
        some,
        1,
    )
    for largest in (1e4, -1e4, 1e30):
        yield f"logits of {largest:g}", drawn(3, 300) + largest, targets(3, 300), SamplingSettings(), 1
    holes = drawn(4, BLOCK + 40)
    holes[:, 0], holes[0, :BLOCK], holes[1, BLOCK:] = -torch.inf, -torch.inf, -torch.inf
    yield (
        "minus infinity in whole blocks",
        holes,
        torch.tensor([BLOCK + 3, 5, 9, BLOCK]),
        SamplingSettings(),
        1,
    )
    for ranks in (2, 3, 4):
        for name, sampling in (("", SamplingSettings(temperature=1.3)), (", some kept", some)):
            # the last rank has padding, with four ranks nothing else; all targets are on the first two
            logits = drawn(5, 2 * 37 if ranks != 3 else 3 * 37 - 4, 2.0)
            yield f"{ranks} shards{name}", logits, targets(5, 60), sampling, ranks


def in_shards(
    logits: Tensor,
    targets: Tensor,
    weights: Tensor,
    sampling: SamplingSettings,
    ranks: int,
    with_entropies: bool,
) -> tuple[Tensor, Tensor]:
    """Values [1 or 2, T] and gradient when every rank has 37 columns, brought together in float64 by hand."""
    size = logits.shape[1]
    padded = torch.nn.functional.pad(logits, (0, ranks * 37 - size), value=torch.nan)
    shards = [
        (padded[:, 37 * rank : 37 * rank + 37].clone(), VocabularyShard(size, 37 * rank))
        for rank in range(ranks)
    ]
    bounds = logprobs._kept_bounds(logits, VocabularyShard(size), sampling)
    options = (sampling.temperature, bounds, with_entropies)
    found = torch.stack(
        [logprobs._local_statistics(part, targets, shard, *options) for part, shard in shards]
    ).double()
    maximum = found[:, 0].amax(0)
    total, target = (found[:, 1] * (found[:, 0] - maximum).exp()).sum(0), found[:, 2].sum(0)
    left_out = torch.zeros_like(total)
    if bounds is not None:
        left_out = (target - maximum).exp().where(target.float() < bounds, left_out)
        total = total + left_out
    values = [target - maximum - total.log()]
    if with_entropies:
        below = found[:, 0] - maximum
        moved = torch.where(below.isfinite(), found[:, 3] + found[:, 1] * below, 0.0) * below.exp()
        values.append(total.log() - (moved.sum(0) + left_out * (target - maximum)) / total)
    sums = SoftmaxSums(
        maximum.float(),
        total.float(),
        (left_out / total).float(),
        bounds,
        *(each.float() for each in values[1:]),
    )
    given = (sampling.temperature, sums, *weights)
    gradients = [
        logprobs.gradient_of_logits(part, targets, shard, *given, overwrite=True) for part, shard in shards
    ]
    assert all(one.data_ptr() == part.data_ptr() for one, (part, _) in zip(gradients, shards, strict=True))
    whole = torch.cat(gradients, dim=1)
    assert whole[:, size:].eq(0).all()
    return torch.stack(values), whole[:, :size]


def left_out(scaled: Tensor, targets: Tensor, sampling: SamplingSettings) -> Tensor:
    """[T, V] bool: what sampling leaves out of float64 rows, neither tokens that tie with the last one kept
    nor targets."""
    least = [min(row[token] for token in _kept(row.tolist(), sampling)) for row in scaled]
    return (scaled < torch.stack(least)[:, None]).scatter(1, targets[:, None], False)


def errors(
    logits: Tensor, targets: Tensor, sampling: SamplingSettings, ranks: int, with_entropies: bool
) -> dict[str, float]:
    """Largest differences from float64, relative where numbers are above 1."""
    weights = torch.stack(
        [torch.linspace(-1, 2, len(targets)), torch.linspace(1, -3, len(targets))][: 1 + with_entropies]
    )
    weights[:, 1::3] = 0  # positions that a mask leaves out
    exact = logits.double().requires_grad_()
    scaled = exact / sampling.temperature
    if not sampling.keeps_all(logits.shape[1]):
        scaled = scaled.masked_fill(left_out(scaled, targets, sampling), -torch.inf)
    logarithms = scaled.log_softmax(-1)
    expected = logarithms.gather(-1, targets[:, None]).squeeze(-1)[None]
    if with_entropies:
        shares = logarithms.exp() * logarithms.masked_fill(logarithms == -torch.inf, 0.0)
        expected = torch.cat([expected, -shares.sum(-1)[None]])
    (expected * weights.double()).sum().backward()
    if ranks == 1:
        leaf, shard = logits.clone().requires_grad_(), VocabularyShard(logits.shape[1])
        scores = vocab_parallel_scores(
            leaf * 1, targets, shard, sampling, overwrite=True, with_entropies=with_entropies
        )
        measured = torch.stack([each for each in (scores.logprobs, scores.entropies) if each is not None])
        (measured * weights).sum().backward()
        gradient = leaf.grad
    else:
        measured, gradient = in_shards(logits, targets, weights, sampling, ranks, with_entropies)
    assert gradient is not None and exact.grad is not None
    assert gradient[weights[0] == 0].eq(0).all()

    def largest(one: Tensor, two: Tensor) -> float:
        return (
            float(((one.detach().double() - two.detach()).abs() / two.detach().abs().clamp(min=1)).max())
            if one.numel()
            else 0.0
        )

    return {"value": largest(measured, expected), "gradient": largest(gradient, exact.grad)}


def without_finite_logits() -> list[bool]:
    """Whether a row has a finite log-probability, where it has NaN, infinity, nothing but minus infinity, and
    an ordinary one."""
    logits = torch.randn(4, BLOCK + 9, generator=torch.Generator().manual_seed(2))
    logits[0, 3], logits[1, BLOCK + 1], logits[2] = torch.nan, torch.inf, -torch.inf
    return (
        vocab_parallel_scores(logits, torch.full((4,), 7), VocabularyShard(BLOCK + 9))
        .logprobs.isfinite()
        .tolist()
    )


def ignored_targets() -> float:
    """Largest difference from the PyTorch code where targets are padding or no token: values of rows that
    nobody reads, all gradients."""
    logits, targets = (
        torch.randn(4, 73, generator=torch.Generator().manual_seed(3)),
        torch.tensor([-100, 3, 70, -1]),
    )

    def passed() -> Tensor:
        leaf = logits.clone().requires_grad_()
        values = vocab_parallel_scores(
            leaf, targets, VocabularyShard(70), SamplingSettings(temperature=0.9)
        ).logprobs
        values[1:].sum().backward()
        assert leaf.grad is not None
        return torch.cat([values.detach()[:, None], leaf.grad], dim=1)

    found = passed()
    with patched((logprobs, "kernels", lambda *_: None)):
        return float((found - passed()).abs().max())


def cancelled(dtype: torch.dtype) -> float:
    """Largest difference from float64 of a gradient whose parts are thousands, over two blocks: by two tokens
    of each row, one of them the target, and the rest of the probability."""
    logits = torch.randn(3, BLOCK + 9, generator=torch.Generator().manual_seed(4))
    further = torch.tensor([[5, BLOCK + 2], [BLOCK + 8, 0], [17, 4]])
    logits[:2].scatter_(1, further[:2], 17.0)
    given = logits.to(dtype)
    exact, leaf = given.double().requires_grad_(), given.clone().requires_grad_()
    wanted = exact.log_softmax(-1).gather(1, further)
    targets, shard = further[:, 0].contiguous(), VocabularyShard(BLOCK + 9)
    found = vocab_parallel_scores(leaf * 1, targets, shard, overwrite=True, further=further).further
    assert found is not None
    rest = 1 - wanted.detach().exp().sum(dim=1, keepdim=True)
    weights = 0.9 * wanted.detach().exp() / rest - 0.05
    assert float(weights.max()) > 300
    (wanted * weights).sum().backward()
    (found * weights.float()).sum().backward()
    assert leaf.grad is not None and exact.grad is not None
    return float((leaf.grad.double() - exact.grad).abs().max())


if __name__ == "__main__":
    assert logprob_kernels.INTERPRETED and logprobs._kernels_for(torch.zeros(1, 1)), (
        "set TRITON_INTERPRET=1 and MEGARL_LOGPROB_KERNEL=1"
    )
    found = {name: errors(*case, with_entropies=False) for name, *case in cases()}
    found |= {f"{name}, entropies": errors(*case, with_entropies=True) for name, *case in cases()}
    passes = {variant: passes_of_kernels(variant) for variant in VARIANTS}
    print(
        json.dumps(
            {
                "errors": found,
                "finite": without_finite_logits(),
                "ignored": ignored_targets(),
                "further": {
                    str(dtype): cancelled(dtype) for dtype in (torch.float32, torch.bfloat16, torch.float16)
                },
                "passes": passes,
            }
        )
    )
