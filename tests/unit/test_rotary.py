"""The rotary embedding by positions: the bits of Megatron-Core's own, forward and backward, and the numbers
of complex multiplication."""

from __future__ import annotations

import importlib.util
import itertools
import json
import random
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.models.common.embeddings import YarnRotaryEmbedding, rope_utils
from torch import Tensor

from megarl import env
from megarl.models.engine.context import ContextShare
from megarl.models.megatron.build import _tables_in_equal_parts
from megarl.models.megatron.rotary import by_kernel, rotate, rotated_by, rotation
from tests.tiers import ROOT, newest_megatron, slow


def angles_of(positions: int, width: int) -> Tensor:
    """[positions, 1, 1, width] as Megatron's embeddings give them."""
    half = torch.outer(
        torch.arange(positions, dtype=torch.float32), 10000.0 ** (-torch.arange(0, width, 2) / width)
    )
    return torch.cat((half, half), dim=-1)[:, None, None]


def through(function: Any, tensor: Tensor, pull: Tensor) -> list[Tensor]:
    """What a function gives, and the gradient of its product with ``pull``."""
    leaf = tensor.clone().requires_grad_()
    output = function(leaf)
    output.backward(pull)
    assert leaf.grad is not None
    return [output.detach(), leaf.grad]


@newest_megatron
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_packed_sequences_have_the_bits_of_megatron_s_own(seed: int, dtype: torch.dtype) -> None:
    drawn, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    size = drawn.choice([1, 2, 3])
    share = ContextShare(drawn.randrange(size), size)
    lengths = [2 * size * drawn.randint(1, 9) for _ in range(drawn.randint(1, 5))]
    starts = (0, *itertools.accumulate(lengths))
    width, head, factor = (*drawn.choice([(8, 8), (6, 10)]), drawn.choice([1.0, 1.37]))
    angles = angles_of(max(lengths), width)
    tensor, pull = (torch.randn(starts[-1] // size, 3, head, generator=generator).to(dtype) for _ in range(2))
    group: Any = SimpleNamespace(size=lambda: size, rank=lambda: share.rank)

    def theirs(given: Tensor) -> Tensor:
        limits = torch.tensor(starts, dtype=torch.int32)
        return rope_utils._apply_rotary_pos_emb_thd(given, limits, angles, mscale=factor, cp_group=group)

    positions = torch.cat([torch.arange(length) for length in lengths])[share.index(starts)]
    by = rotation(angles, positions, dtype, factor)
    expected, found = (
        through(theirs, tensor, pull),
        through(lambda given: rotate(given[:, None], by)[:, 0], tensor, pull),
    )
    for ours, wanted in zip(found, expected, strict=True):
        assert torch.equal(ours, wanted), f"seed {seed}: {(ours - wanted).abs().max()}"


@newest_megatron
@pytest.mark.parametrize("width", [8, 4])
def test_rows_have_the_bits_of_megatron_s_own(width: int) -> None:
    generator = torch.Generator().manual_seed(1)
    tensor, pull = (torch.randn(9, 2, 3, 8, generator=generator) for _ in range(2))
    angles = angles_of(9, width)
    by = rotation(angles, None, torch.float32, 1.0)
    expected = through(lambda given: rope_utils._apply_rotary_pos_emb_bshd(given, angles), tensor, pull)
    for ours, wanted in zip(through(lambda given: rotate(given, by), tensor, pull), expected, strict=True):
        assert torch.equal(ours, wanted)


def test_each_pair_is_multiplied_by_a_complex_number() -> None:
    """Positions of rows that differ, in float64; the gradient is multiplied by the conjugate."""
    generator = torch.Generator().manual_seed(2)
    tensor, pull = (torch.randn(4, 2, 3, 6, generator=generator, dtype=torch.float64) for _ in range(2))
    positions = torch.tensor([[0, 7], [1, 7], [2, 30], [30, 0]])
    angles = angles_of(31, 6).double()
    output, gradient = through(
        lambda given: rotate(given, rotation(angles, positions, torch.float64, 1.0)), tensor, pull
    )
    turn = torch.polar(torch.ones(31, 3, dtype=torch.float64), angles[:, 0, 0, :3])[positions][:, :, None]
    for found, given, factor in ((output, tensor, turn), (gradient, pull, turn.conj())):
        expected = torch.complex(given[..., :3], given[..., 3:]) * factor
        torch.testing.assert_close(
            found, torch.cat((expected.real, expected.imag), dim=-1), rtol=1e-14, atol=1e-14
        )


def test_a_rotation_is_made_once_for_all_layers() -> None:
    angles, positions = angles_of(5, 4), torch.tensor([0, 1, 0, 1, 2])
    once = rotation(angles, positions, torch.float32, 1.0)
    assert rotation(angles, positions, torch.float32, 1.0) is once
    assert rotation(angles, positions.clone(), torch.float32, 1.0) is not once
    assert rotation(angles, positions, torch.bfloat16, 1.0) is not once


def errors_of_the_kernel() -> dict[str, float]:
    """For shapes, strides, dtypes and both directions: the largest difference from the plain operations in
    float64."""
    generator, errors = torch.Generator().manual_seed(3), {}
    for dtype, (tokens, rows, heads, width, rotated), of_rows, back in itertools.product(
        (torch.float32, torch.float16),
        ((5, 1, 3, 8, 8), (3, 2, 9, 10, 6), (1, 1, 1, 2, 2), (0, 1, 2, 4, 4)),
        (False, True),
        (False, True),
    ):
        # every third element of a larger tensor's heads: no stride is that of a contiguous one
        tensor = torch.randn(tokens, rows, 3 * heads, width, generator=generator).to(dtype)[:, :, ::3]
        positions = torch.randint(20, (tokens, rows) if of_rows else (tokens,), generator=generator)
        by = rotation(angles_of(20, rotated), positions, dtype, 1.0)
        found = by_kernel(tensor, by.cosines, by.signed_sines, back=back)
        expected = rotated_by(tensor.double(), by.cosines.double(), by.signed_sines.double(), back=back)
        assert found.shape == tensor.shape and found.dtype == dtype and found.is_contiguous()
        difference = (found.double() - expected).abs().max() if found.numel() else torch.zeros(())
        errors[f"{dtype} {tokens}x{rows}x{heads}x{width} {rotated} {of_rows} {back}"] = float(difference)
    return errors


@newest_megatron
@slow
@pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed: pip install triton"
)
def test_the_kernel_gives_the_same_numbers_in_triton_s_interpreter() -> None:
    command = [sys.executable, "-m", __name__]
    ran = subprocess.run(
        command,
        cwd=ROOT,
        env={**env.snapshot(), "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    errors = json.loads(ran.stdout.splitlines()[-1])
    # half a unit in the last place of values up to 8
    assert (
        len(errors) == 32
        and {name: error for name, error in errors.items() if error > (5e-7 if "32" in name else 4e-3)} == {}
    )


if __name__ == "__main__":
    print(json.dumps(errors_of_the_kernel()))


@pytest.mark.parametrize(("context", "rows"), [(1, 32), (2, 32), (3, 36), (5, 40)])
def test_yarns_table_has_equal_parts_for_every_number_of_context_ranks(
    context: int, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))

    def table() -> YarnRotaryEmbedding:
        return YarnRotaryEmbedding(
            12, scaling_factor=4.0, original_max_position_embeddings=32, use_cpu_initialization=True
        )

    with _tables_in_equal_parts(context):
        found = table()
    assert len(found.cos_cached) == rows
    assert torch.equal(found.cos_cached[:32], table().cos_cached) and torch.equal(
        found.sin_cached[:32], table().sin_cached
    )
