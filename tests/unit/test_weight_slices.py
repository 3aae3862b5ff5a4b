"""Slices of weights: what loaders read is found out by looking on, and a part passes for the whole with the
same numbers, or not at all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megarl.errors import RefitError
from megarl.weight_sync.manifest import Manifest
from megarl.weight_sync.plan import padded_bytes
from megarl.weight_sync.slices import PartialWeight, Reads, Slice

CPU = torch.device("cpu")
Load = Callable[[Tensor, Tensor], None]


def rows(into: Tensor, weight: Tensor) -> None:
    """The second of two ranks of a column-parallel layer."""
    into.copy_(weight.narrow(0, into.shape[0], into.shape[0]))


def columns(into: Tensor, weight: Tensor) -> None:
    """The second of two ranks of a row-parallel layer, whose loader looks at sizes."""
    assert weight.dim() == 2 and weight.shape[0] == into.shape[0] and weight.numel() == 2 * into.numel()
    into.copy_(weight[:, into.shape[1] :])


def item(into: Tensor, weight: Tensor) -> None:
    """By an index of what is written."""
    into[1:3] = weight[4:6]


def padded(into: Tensor, weight: Tensor) -> None:
    """A vocabulary whose last rank has less than the others, in pieces."""
    for piece, own in zip(weight[5:].chunk(2), into[: len(weight) - 5].chunk(2), strict=True):
        own.data.copy_(piece)
    into[len(weight) - 5 :].fill_(0)


def transposed(into: Tensor, weight: Tensor) -> None:
    """A view that is no block of the weight."""
    into.t().copy_(weight.detach().t()[:, 3:6])


def folded(into: Tensor, weight: Tensor) -> None:
    """Heads that are dimensions of their own, one after another."""
    heads = weight.view(4, 2, -1)
    for head in (2, 1):
        into.view(2, 2, -1)[head - 1].copy_(heads[head])


def computed(into: Tensor, weight: Tensor) -> None:
    """Another dtype, made of a part."""
    into.copy_(weight[2:4].to(torch.float64))


def on_its_device(into: Tensor, weight: Tensor) -> None:
    assert weight.device.type == "cpu" and not weight.is_meta
    into.copy_(weight[1:2].to(into.device))


# shape of the weight, of what it is loaded into, and what of it is read
LOADERS: dict[Load, tuple[Sequence[int], Sequence[int], Slice]] = {
    rows: ((6, 5), (3, 5), Slice(0, 3, 3)),
    columns: ((5, 6), (5, 3), Slice(1, 3, 3)),
    item: ((7,), (4,), Slice(0, 4, 2)),
    padded: ((8, 3), (5, 3), Slice(0, 5, 3)),
    transposed: ((7, 4), (3, 4), Slice(0, 3, 3)),
    folded: ((8, 3), (4, 3), Slice(0, 2, 4)),
    computed: ((5, 3), (2, 3), Slice(0, 2, 2)),
    on_its_device: ((3, 2), (1, 2), Slice(0, 1, 1)),
}


def read_by(
    load: Load, shape: Sequence[int], into: Sequence[int], dtype: torch.dtype = torch.float32
) -> Slice | None:
    reads, target = Reads(), torch.full(tuple(into), 7.0)
    load(target, PartialWeight.noting(shape, dtype, CPU, reads))
    # where nothing but zeros is written, which do not come of the weight
    assert set(target.unique().tolist()) <= {7.0, 0.0}
    return reads.slice_of(shape)


@pytest.mark.parametrize("load", LOADERS, ids=lambda load: load.__name__)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_a_part_passes_for_the_whole_where_the_loader_reads_it(load: Load, dtype: torch.dtype) -> None:
    shape, into, expected = LOADERS[load]
    where = read_by(load, shape, into, dtype)
    assert where == expected
    whole = torch.randn(tuple(shape), generator=torch.Generator().manual_seed(3)).to(dtype)
    part = PartialWeight.of(where.of(whole).clone(), shape, where)
    assert (
        isinstance(part, Tensor)
        and part.shape == whole.shape
        and part.dtype == dtype
        and part.size(0) == shape[0]
    )
    right, found = torch.full(tuple(into), 7.0), torch.full(tuple(into), 7.0)
    load(right, whole)
    load(found, part)
    assert torch.equal(right, found)


@pytest.mark.parametrize("load", LOADERS, ids=lambda load: load.__name__)
def test_values_that_did_not_come_are_refused(load: Load) -> None:
    shape, into, where = LOADERS[load]
    less = Slice(where.dim, where.start + 1, where.length - 1)
    part = PartialWeight.of(less.of(torch.ones(tuple(shape))).clone(), shape, less)
    with pytest.raises(
        RefitError,
        match=rf"the engine reads \d+ to \d+ of dimension {where.dim} of a weight of shape .*, but received "
        r"only",
    ):
        load(torch.zeros(tuple(into)), part)
    with pytest.raises(RefitError, match="the engine reads 0 to"):
        PartialWeight.of(where.of(torch.ones(tuple(shape))).clone(), shape, where).sum()


@given(st.data())
def test_blocks_of_any_weight_are_those_of_the_whole(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=3))
    dim = data.draw(st.integers(0, len(shape) - 1))
    start = data.draw(st.integers(0, shape[dim] - 1))
    where = Slice(dim, start, data.draw(st.integers(1, shape[dim] - start)))
    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    part = PartialWeight.of(where.of(whole).clone(), shape, where)
    spans = []
    for axis, size in enumerate(shape):
        low, high = (where.start, where.stop) if axis == dim else (0, size)
        first = data.draw(st.integers(low, high))
        spans.append((first, data.draw(st.integers(first, high))))
    view, expected = part, whole
    for axis in data.draw(st.permutations(range(len(shape)))):
        first, last = spans[axis]
        view, expected = view.narrow(axis, first, last - first), expected.narrow(axis, first, last - first)
    found = torch.zeros_like(expected)
    found.copy_(view)
    assert torch.equal(found, expected)


@pytest.mark.parametrize(
    ("boxes", "whole", "expected"),
    [
        ([], (4, 3), Slice(0, 0, 0)),
        ([(range(0, 4), range(0, 3))], (4, 3), None),
        ([(range(1, 3), range(0, 3))], (4, 3), Slice(0, 1, 2)),
        # read twice, as an embedding that is also the output layer
        ([(range(1, 2), range(0, 3)), (range(2, 4), range(0, 3))], (4, 3), Slice(0, 1, 3)),
        ([(range(0, 4), range(1, 2)), (range(1, 2), range(0, 3))], (4, 3), None),
        ([(range(1, 2), range(1, 2))], (4, 3), None),
        ([(range(2, 2), range(0, 3))], (4, 3), Slice(0, 0, 0)),
        ([], (), None),
        ([()], (), None),
    ],
    ids=["nothing", "all", "rows", "twice", "both-ways", "a-corner", "no-row", "unread-scalar", "scalar"],
)
def test_what_is_read_is_the_least_slice_that_has_it(boxes: Any, whole: Any, expected: Slice | None) -> None:
    reads = Reads()
    for box in boxes:
        reads.add(box)
    assert reads.slice_of(whole) == expected


def test_a_loader_that_wants_a_value_gets_it_or_an_error() -> None:
    whole = torch.arange(4.0)
    assert PartialWeight.of(whole[1:2].clone(), (4,), Slice(0, 1, 1))[1:2].item() == 1.0
    with pytest.raises(RuntimeError):
        PartialWeight.noting((1,), torch.float32, CPU, Reads()).item()
    with pytest.raises(RefitError, match="add_ would write into a weight"):
        PartialWeight.of(whole[1:2].clone(), (4,), Slice(0, 1, 1)).add_(1)
    with pytest.raises(RefitError, match="__setitem__ would write"):
        PartialWeight.of(whole[1:2].clone(), (4,), Slice(0, 1, 1))[0] = 1
    with pytest.raises(RefitError, match=r"a slice of shape \[2\] came where \[1\] was announced"):
        PartialWeight.of(whole[1:3].clone(), (4,), Slice(0, 1, 1))


def not_mine(into: Tensor, weight: Tensor) -> None:
    """The loader of an expert that another rank has."""
    assert weight.dim() == 2 and weight.numel() and into.dim() == 2


def test_of_a_weight_that_is_not_read_nothing_is_sent_and_what_stands_for_it_gives_no_value() -> None:
    assert read_by(not_mine, (4, 3), (4, 3)) == Slice(0, 0, 0)
    manifest = Manifest.from_description(
        {"mine": ((4, 3), torch.float32), "another's": ((4, 3), torch.float32)}
    )
    sent = manifest.sliced({"another's": Slice(0, 0, 0)})
    assert sent.total_bytes == padded_bytes(4 * 3 * 4)
    part = PartialWeight.of(torch.empty(0, 3), (4, 3), Slice(0, 0, 0))
    not_mine(torch.zeros(4, 3), part)
    with pytest.raises(
        RefitError, match=r"the engine reads 0 to 4 of dimension 0 .* but received only 0 to 0"
    ):
        torch.zeros(4, 3).copy_(part)


def test_a_manifest_says_what_travels_as_slices() -> None:
    whole = Manifest.from_description(
        {"a": ((4, 3), torch.float32), "b": ((6,), torch.bfloat16), "c": ((), torch.float32)}
    )
    first, second = (whole.sliced({"a": Slice(0, start, 2)}) for start in (0, 2))
    assert [tensor.shape for tensor in first.tensors] == [(2, 3), (6,), ()]
    assert first.slices == {"a": (Slice(0, 0, 2), (4, 3))}
    # of the same shapes, and yet not to be taken for one another
    assert (
        first.description() == second.description() and len({first.digest, second.digest, whole.digest}) == 3
    )
    assert whole.sliced({}).digest == whole.digest == Manifest(whole.tensors).digest
    with pytest.raises(RefitError, match="a slice of d was requested"):
        whole.sliced({"d": Slice(0, 0, 1)})
    with pytest.raises(
        RefitError, match=r"a slice from 3 to 5 of dimension 0 is outside a weight of shape \[4, 3\]"
    ):
        whole.sliced({"a": Slice(0, 3, 2)})
