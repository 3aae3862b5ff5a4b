"""The log-probabilities of logits on a CUDA device: the Triton kernels and the PyTorch code, each against the
CPU.

Skipped where there is no CUDA device.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megarl.models.engine import logprobs
from megarl.models.engine.logprobs import VocabularyShard, vocab_parallel_scores
from megarl.models.generation.sampling import SamplingSettings

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.parametrize(
    "sampling", [SamplingSettings(), SamplingSettings(temperature=0.7, top_k=50)], ids=["all", "some"]
)
@pytest.mark.parametrize("vocabulary", [77, 4096, 151_936])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("code", ["kernels", "pytorch"])
def test_values_and_gradients_equal_those_of_the_cpu(
    monkeypatch: pytest.MonkeyPatch,
    code: str,
    dtype: torch.dtype,
    vocabulary: int,
    sampling: SamplingSettings,
) -> None:
    """Which ``tests/unit/test_logprobs.py`` compares with float64; a quotient rounded otherwise would move
    the edge of the top k."""
    generator = torch.Generator().manual_seed(vocabulary)
    logits = (torch.randn(17, vocabulary + 3, generator=generator) * 3).to(dtype)
    targets = torch.randint(vocabulary, (17,), generator=generator)

    def passed(device: str) -> tuple[Tensor, Tensor]:
        leaf = logits.clone().to(device).requires_grad_()
        values = vocab_parallel_scores(
            leaf * 1, targets.to(device), VocabularyShard(vocabulary), sampling, overwrite=True
        ).logprobs
        (values * torch.linspace(-1, 2, 17).to(device)).sum().backward()
        assert leaf.grad is not None and leaf.grad[:, vocabulary:].eq(0).all()
        return values.detach().cpu(), leaf.grad.cpu()

    expected = passed("cpu")
    if code == "pytorch":
        monkeypatch.setattr(logprobs, "kernels", lambda *_: None)
    else:
        assert logprobs._kernels_for(logits.cuda()) is not None, "PyTorch for CUDA without Triton"
    found = passed("cuda")
    torch.testing.assert_close(found[0], expected[0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(found[1], expected[1], atol=1e-5, rtol=max(1e-5, torch.finfo(dtype).eps))
