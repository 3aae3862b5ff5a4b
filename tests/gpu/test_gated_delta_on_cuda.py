"""The gated delta rule on a CUDA device, by its Triton kernels and by PyTorch's operations: outputs and
gradients are those of the recurrence in float64.

Skipped where there is no CUDA device.
"""

from __future__ import annotations

import pytest
import torch

from megarl.models.engine import gated_delta
from tests.unit.test_gated_delta import check_close, gradients_of, leaves, mixed_by, slow

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
STARTS = (0, 150, 151, 279)


@pytest.mark.parametrize("code", ["kernel", "pytorch"])
def test_chunks_are_the_recurrence(code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if code == "pytorch":
        monkeypatch.setattr(gated_delta, "kernels", lambda *_: None)
    wanted = leaves(STARTS[-1])
    expected = slow(wanted, STARTS)
    given = {
        name: tensor.detach().cuda().requires_grad_(name != "pull")
        for name, tensor in leaves(STARTS[-1], torch.float32).items()
    }
    output = mixed_by(given, STARTS)
    found = {"output": output.detach(), **gradients_of(given, output)}
    check_close(
        {name: tensor.cpu() for name, tensor in found.items()},
        {"output": expected.detach(), **gradients_of(wanted, expected)},
        1e-5,
    )
