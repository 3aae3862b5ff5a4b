"""Clipping over all gradients at once, to the bit as Megatron-Core's own loops; reductions in overlap where
there are any."""

from __future__ import annotations

import pytest
import torch
from megatron.core.utils import local_multi_tensor_l2_norm, local_multi_tensor_scale

from megarl.models.megatron import cuda_redirect, optimizer
from megarl.models.megatron.settings import ddp_config
from tests.models import policy_config
from tests.tiers import newest_megatron

pytestmark = newest_megatron


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("count", [1, 2, 51])
def test_norm_and_scale_are_those_of_one_tensor_after_another(dtype: torch.dtype, count: int) -> None:
    generator = torch.Generator().manual_seed(count)
    tensors = [torch.randn(13, index + 1, generator=generator).to(dtype) for index in range(count)]
    with cuda_redirect.cuda_literals():
        # Megatron-Core's own rounds the norm of a tensor of 16 bits to 16 bits
        expected, _ = local_multi_tensor_l2_norm(0, None, [[tensor.float() for tensor in tensors]], False)
        found, _ = optimizer._norm_of_all(0, torch.zeros(1), [tensors], False)
    assert found.shape == expected.shape == (1,) and found.dtype is torch.float32
    torch.testing.assert_close(found, expected, rtol=1e-6 if dtype is torch.bfloat16 else 0, atol=0)
    theirs, ours = ([tensor.clone() for tensor in tensors] for _ in range(2))
    local_multi_tensor_scale(0, None, [theirs, theirs], 0.0372913)
    optimizer._scale_all(0, torch.zeros(1), [ours, ours], 0.0372913)
    assert all(torch.equal(one, other) for one, other in zip(theirs, ours, strict=True))
    others = [torch.empty_like(tensor) for tensor in tensors]
    optimizer._scale_all(0, torch.zeros(1), [tensors, others], 0.0372913)
    assert all(torch.equal(one, other) for one, other in zip(theirs, others, strict=True))


def test_only_megatron_s_own_loops_are_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    assert {name for _, name, _ in optimizer._over_all()} == {"l2_norm_impl", "multi_tensor_scale_impl"}
    monkeypatch.setattr(
        optimizer.clip_grads, "l2_norm_impl", lambda *arguments: None
    )  # as Transformer Engine's
    assert {name for _, name, _ in optimizer._over_all()} == {"multi_tensor_scale_impl"}


@pytest.mark.parametrize(
    ("said", "gathers", "replicas", "overlaps"),
    [
        (None, False, 1, False),
        (None, False, 2, True),
        (None, True, 1, True),
        (False, False, 2, False),
        (True, False, 1, True),
    ],
)
def test_gradients_are_reduced_in_overlap_where_several_ranks_have_them(
    said: bool | None, gathers: bool, replicas: int, overlaps: bool
) -> None:
    policy = policy_config("model")
    policy["megatron_cfg"]["distributed_data_parallel_config"] |= {
        "overlap_grad_reduce": said,
        "overlap_param_gather": gathers,
    }
    assert ddp_config(policy, replicas).overlap_grad_reduce is overlaps
