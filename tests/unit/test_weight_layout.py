"""Where weights lie in a buffer, and how they come there: against copies of one weight at a time, for any
shapes, types and strides."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megarl.errors import RefitError
from megarl.weight_sync import plan
from megarl.weight_sync.manifest import Manifest, pack
from megarl.weight_sync.plan import ALIGNMENT

DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float64,
    torch.int8,
    torch.bool,
    torch.complex64,
]
# a scalar, empty ones, odd ones, and rows that need no padding in every type
SHAPES = [
    (),
    (0,),
    (0, 5),
    (3, 0),
    (1,),
    (33,),
    (5, 7),
    (2, 3, 5),
    (256,),
    (512,),
    (1, 256),
    (3, 256),
    (2, 4, 64),
    (3, 4, 64),
    (2, 8, 8, 8),
]
STRIDES = ["contiguous", "transposed", "sliced", "expanded", "channels last", "parameter"]


def _bytes_of(tensor: Tensor) -> bytes:
    flat = torch.empty(tensor.numel(), dtype=tensor.dtype)
    flat.view(tensor.shape).copy_(tensor.detach())
    return bytes(flat.view(torch.uint8).tolist())


def _weight(shape: tuple[int, ...], dtype: torch.dtype, strides: str, seed: int) -> Tensor:
    """Random bytes, except where a type knows few of them."""
    generator = torch.Generator().manual_seed(seed)

    def filled(*sizes: int) -> Tensor:
        high = 2 if dtype == torch.bool else 256
        data = torch.randint(
            0, high, (math.prod(sizes) * dtype.itemsize,), dtype=torch.uint8, generator=generator
        )
        return data.view(dtype).view(sizes)

    if strides == "transposed":
        return filled(*reversed(shape)).permute(tuple(reversed(range(len(shape)))))
    if strides == "sliced" and shape:
        return filled(*shape[:-1], shape[-1] + 3)[..., 2:-1]
    if strides == "expanded" and shape:
        return filled(1, *shape[1:]).expand(shape)
    if strides == "channels last" and len(shape) == 4:
        return filled(*shape).to(memory_format=torch.channels_last)
    if strides == "parameter" and dtype.is_floating_point:
        return torch.nn.Parameter(filled(*shape))
    return filled(*shape)


@st.composite
def weights_of_any_kind(draw: st.DrawFn) -> list[Tensor]:
    """Of few dtypes, so that many of them have theirs in common."""
    dtypes = st.sampled_from(draw(st.lists(st.sampled_from(DTYPES), min_size=1, max_size=2)))
    kinds = st.builds(_weight, st.sampled_from(SHAPES), dtypes, st.sampled_from(STRIDES), st.integers(0, 9))
    return draw(st.lists(kinds, min_size=1, max_size=20))


@given(weights_of_any_kind(), st.sampled_from([1 << 25, 3000, 1]), st.data())
def test_every_weight_arrives_as_it_is_on_a_place_of_its_own(
    weights: list[Tensor], staged: int, data: st.DataObject
) -> None:
    sent = [(f"w{index}", weight) for index, weight in enumerate(weights)]
    manifest = Manifest.of(sent)
    first = data.draw(st.integers(0, min(2, len(sent) - 1)))
    count = len(sent) - data.draw(st.integers(first, min(first + 2, len(sent) - 1)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan, "STAGED_BYTES", staged)
        group = manifest.group(first, count)
    buffer = torch.full((group.nbytes + 512,), 255, dtype=torch.uint8)[256:]
    stream = iter(sent[first:])
    pack(stream, manifest, group, buffer)
    assert [name for name, _ in stream] == [name for name, _ in sent[first + count :]]
    arrived = group.views(buffer)
    assert [(name, view.shape, view.dtype, _bytes_of(view)) for name, view in arrived] == [
        (name, weight.shape, weight.dtype, _bytes_of(weight)) for name, weight in sent[first : first + count]
    ]
    assert all(view.is_contiguous() and not view.requires_grad for _, view in arrived)
    places = sorted((view.data_ptr() - buffer.data_ptr(), view.nbytes) for _, view in arrived if view.numel())
    assert all(begin % ALIGNMENT == 0 for begin, _ in places)
    end = 0
    for begin, nbytes in [*places, (group.nbytes, 0)]:
        assert end <= begin and not buffer[end:begin].any(), (
            "weights overlap, or what lies between them is not zero"
        )
        end = begin + nbytes
    assert buffer[group.nbytes :].eq(255).all()


@pytest.mark.parametrize(
    "other",
    [torch.zeros(4, 64), torch.zeros(64, 2), torch.zeros(2, 64, dtype=torch.bfloat16), torch.zeros(128)],
)
def test_one_other_weight_among_many_alike_is_refused_before_anything_of_its_batch_is_written(
    other: Tensor,
) -> None:
    weights = [(f"w{index}", torch.ones(2, 64)) for index in range(9)]
    manifest = Manifest.of(weights)
    group = manifest.group(0, 9)
    buffer = torch.zeros(group.nbytes, dtype=torch.uint8)
    weights[5] = ("w5", other)
    with pytest.raises(RefitError, match=r"gives w5 .* where w5 \[2, 64\] float32 was announced"):
        pack(iter(weights), manifest, group, buffer)
    assert not buffer.any()


def test_weights_in_another_order_are_refused() -> None:
    weights = [(f"w{index}", torch.ones(2, 64)) for index in range(3)]
    manifest = Manifest.of(weights)
    group = manifest.group(0, 3)
    with pytest.raises(RefitError, match=r"gives w2 \[2, 64\] float32 where w1"):
        pack(
            iter([weights[0], weights[2], weights[1]]),
            manifest,
            group,
            torch.zeros(group.nbytes, dtype=torch.uint8),
        )
