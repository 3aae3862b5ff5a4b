"""Formats of optimizer states: numbers that are read and written again stay, rounding is right on average,
and a second moment that is not 0 never becomes 0."""

from __future__ import annotations

import math

import pytest
import torch

from megarl.models.engine.state_formats import BLOCK, FORMATS, Blockwise, random_bits

CPU = torch.device("cpu")
LOW = [
    ("exp_avg", "bfloat16"),
    ("exp_avg", "8bit"),
    ("exp_avg_sq", "bfloat16"),
    ("exp_avg_sq", "8bit"),
    ("master", "bfloat16"),
]
COUNT = 3 * BLOCK + 37


def numbers(state: str, spread: float = 1.0) -> torch.Tensor:
    """Of many sizes in each block."""
    generator = torch.Generator().manual_seed(5)
    values = torch.randn(COUNT, generator=generator) * torch.exp(
        spread * torch.randn(COUNT, generator=generator)
    )
    return values.square() if state == "exp_avg_sq" else values


@pytest.mark.parametrize(("state", "name"), LOW)
@pytest.mark.parametrize("size", [1.0, 1e-30, 0.0])
def test_what_was_read_is_written_as_it_was(state: str, name: str, size: float) -> None:
    form, values = FORMATS[state][name], numbers(state, 3.0) * size
    stored, again = form.zeros(COUNT, CPU), form.zeros(COUNT, CPU)
    form.write(stored, 0, values, random_bits("a", 0, COUNT, CPU) & 0xFFFF)
    found = form.read(stored, 0, COUNT)
    assert found.dtype is torch.float32 and not found.isnan().any() and bool(found.any()) is bool(size)
    form.write(again, 0, found.clone(), None)
    assert torch.equal(form.read(again, 0, COUNT), found)


@pytest.mark.parametrize(("state", "name"), LOW)
def test_slices_are_stored_as_the_whole(state: str, name: str) -> None:
    form, values = FORMATS[state][name], numbers(state)
    whole, slices = form.zeros(COUNT, CPU), form.zeros(COUNT, CPU)
    form.write(whole, 0, values, None)
    for first in range(0, COUNT, 2 * BLOCK):
        form.write(slices, first, values[first : first + 2 * BLOCK], None)
    assert torch.equal(whole, slices)
    assert torch.equal(form.read(whole, 2 * BLOCK, COUNT), form.read(whole, 0, COUNT)[2 * BLOCK :])


@pytest.mark.parametrize(("state", "name"), LOW)
def test_rounding_is_right_on_average(state: str, name: str) -> None:
    """The mean of many roundings lies within five standard errors, which follow from the distance of two
    numbers of the format."""
    form, values, tries = FORMATS[state][name], numbers(state), 2000
    stored, total = form.zeros(COUNT, CPU), torch.zeros(COUNT, dtype=torch.float64)
    spacing = values.abs().double() / (128 if name == "bfloat16" else 8)
    if isinstance(form, Blockwise):
        largest = torch.stack([block.abs().max() for block in values.split(BLOCK)]).repeat_interleave(BLOCK)[
            :COUNT
        ]
        spacing += form.least * largest
        if state == "exp_avg_sq":  # smaller ones are rounded up
            values = torch.maximum(values, form.least * largest)
    for number in range(tries):
        form.write(stored, 0, values, random_bits(f"{number}", 0, COUNT, CPU) & 0xFFFF)
        total += form.read(stored, 0, COUNT)
        assert ((form.read(stored, 0, COUNT) - values).abs() <= spacing).all()
    # 16 random bits leave a probability of 2**-16 to say
    assert ((total / tries - values).abs() <= 5 * spacing / math.sqrt(4 * tries) + spacing * 2**-15).all()


def test_a_second_moment_never_becomes_zero_and_zero_stays() -> None:
    form = FORMATS["exp_avg_sq"]["8bit"]
    values = torch.cat([torch.ones(1), torch.logspace(-1, -37, BLOCK - 3), torch.zeros(2)])
    stored = form.zeros(BLOCK, CPU)
    for bits in (None, *(random_bits(f"{number}", 0, BLOCK, CPU) & 0xFFFF for number in range(50))):
        form.write(stored, 0, values, bits)
        found = form.read(stored, 0, BLOCK)
        assert torch.equal(found > 0, values > 0) and found[0] == 1.0
        assert (found >= values * 0.88).all() and (
            found <= torch.maximum(values * 1.13, torch.tensor(2.0**-31))
        ).all()


def test_sizes_are_one_byte_and_a_scale_a_block() -> None:
    assert FORMATS["exp_avg"]["8bit"].zeros(COUNT, CPU).nbytes == COUNT + 4 * 4
    assert FORMATS["exp_avg"]["bfloat16"].zeros(COUNT, CPU).nbytes == 2 * COUNT
    signed, positive = (FORMATS[state]["8bit"] for state in ("exp_avg", "exp_avg_sq"))
    assert isinstance(signed, Blockwise) and isinstance(positive, Blockwise)
    # powers of two below the scale: as many as the docstring says
    assert (-16 < math.log2(signed.least) <= -15) and (-32 < math.log2(positive.least) <= -31)


def test_bits_depend_on_key_and_position_alone() -> None:
    bits = random_bits("seed 3 step 7", 0, 5000, CPU)
    assert torch.equal(random_bits("seed 3 step 7", 1234, 100, CPU), bits[1234:1334])
    assert not torch.equal(random_bits("seed 3 step 8", 0, 5000, CPU), bits)


def test_bits_are_fair_and_steps_are_unlike() -> None:
    count = 2**16
    one, other = (random_bits(key, 0, count, CPU) for key in ("1", "2"))
    for bit in range(32):
        ones = ((one >> bit) & 1).double()
        # six standard deviations of a fair coin; of a bit and that of the next step, and of its neighbour
        for with_it in (torch.ones(count), ((other >> bit) & 1).double() * 2 - 1, ones.roll(1) * 2 - 1):
            assert ((ones * 2 - 1) * with_it).mean().abs() < 6 / math.sqrt(count)
    # parts that round two states of a step
    low, high = ((one & 0xFFFF).double(), ((one >> 16) & 0xFFFF).double())
    assert torch.corrcoef(torch.stack([low, high]))[0, 1].abs() < 6 / math.sqrt(count)
