"""The gated delta rule in chunks against the recurrence token by token in float64, with all sizes different;
its step; its convolution."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megarl.models.engine import gated_delta
from megarl.models.engine.gated_delta import (
    ALONE,
    causal_convolution,
    gated_delta_rule,
    gated_delta_step,
    log_decays,
    unit_norm,
)

KEY_HEADS, VALUE_HEADS, KEYS, VALUES, WIDTH = 2, 6, 5, 7, 4
CHANNELS = 2 * KEY_HEADS * KEYS + VALUE_HEADS * VALUES
BOUNDS = {torch.float64: 1e-12, torch.float32: 1e-5}
STARTS = {
    "one chunk": (0, 3),
    "odd end": (0, 13),
    "whole chunks": (0, 8),
    "packed": (0, 1, 10, 14, 22, 24),
    "one token each": (0, 1, 2, 3),
}


def leaves(tokens: int, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """What a mixer makes of its projection, and its parameters. Gates reach from almost 0 to strong, so that
    gradients are compared through the parameters and never by division."""
    generator = torch.Generator().manual_seed(tokens)
    shapes: dict[str, tuple[int, ...]] = {
        "inputs": (tokens, CHANNELS),
        "weight": (CHANNELS, WIDTH),
        "decay": (tokens, VALUE_HEADS),
        "step": (tokens, VALUE_HEADS),
        "A_log": (VALUE_HEADS,),
        "dt_bias": (VALUE_HEADS,),
        "pull": (tokens, VALUE_HEADS, VALUES),
    }
    drawn = {
        name: torch.randn(*shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()
    }
    return {name: tensor.to(dtype).requires_grad_(name != "pull") for name, tensor in drawn.items()}


def heads_of(mixed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    query, key, value = mixed.split([KEY_HEADS * KEYS, KEY_HEADS * KEYS, VALUE_HEADS * VALUES], dim=-1)
    heads = (KEY_HEADS, -1)
    return (
        unit_norm(query.unflatten(-1, heads)),
        unit_norm(key.unflatten(-1, heads)),
        value.unflatten(-1, (VALUE_HEADS, -1)),
    )


def mixed_by(given: dict[str, Tensor], starts: tuple[int, ...], *context: Any) -> Tensor:
    """[t, G, V] by the functions under test."""
    convolved = F.silu(causal_convolution(given["inputs"], given["weight"], starts, *context))
    decays = log_decays(given["decay"], given["A_log"], given["dt_bias"])
    return gated_delta_rule(*heads_of(convolved), decays, given["step"].sigmoid(), starts, *context)[0]


def slow(given: dict[str, Tensor], starts: tuple[int, ...]) -> Tensor:
    """[t, G, V], token by token, sequence by sequence."""
    outputs = []
    for start, end in itertools.pairwise(starts):
        state = torch.zeros(VALUE_HEADS, KEYS, VALUES, dtype=torch.float64)
        for token in range(start, end):
            seen = range(max(start, token - WIDTH + 1), token + 1)
            mixed = torch.stack(
                [given["inputs"][past] * given["weight"][:, WIDTH - 1 - token + past] for past in seen]
            ).sum(0)
            query, key, value = heads_of(F.silu(mixed))
            query, key = (
                heads.repeat_interleave(VALUE_HEADS // KEY_HEADS, dim=0) for heads in (query / KEYS**0.5, key)
            )
            decay = torch.exp(-given["A_log"].exp() * F.softplus(given["decay"][token] + given["dt_bias"]))
            step = given["step"][token].sigmoid()[:, None, None]
            outer = key[:, :, None] * key[:, None, :]
            state = (
                decay[:, None, None] * (state - step * outer @ state)
                + step * key[:, :, None] * value[:, None, :]
            )
            outputs.append((state * query[:, :, None]).sum(1))
    return torch.stack(outputs)


def gradients_of(given: dict[str, Tensor], output: Tensor) -> dict[str, Tensor]:
    names = [name for name in given if name != "pull"]
    return dict(
        zip(
            names,
            torch.autograd.grad(output, [given[name] for name in names], given["pull"].to(output)),
            strict=True,
        )
    )


def check_close(got: dict[str, Tensor], wanted: dict[str, Tensor], bound: float) -> None:
    for name, tensor in wanted.items():
        error = (got[name].double() - tensor).abs().max() / tensor.abs().max().clamp(min=1)
        assert error <= bound, f"{name}: {float(error):.1e}"


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("case", STARTS)
def test_chunks_are_the_recurrence(case: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gated_delta, "CHUNK", 4)
    gated_delta._plan.cache_clear()
    starts = STARTS[case]
    wanted = leaves(starts[-1])
    expected = slow(wanted, starts)
    given = leaves(starts[-1], dtype)
    got = mixed_by(given, starts)
    assert got.dtype == dtype
    found = {"output": got.detach(), **gradients_of(given, got)}
    check_close(found, {"output": expected.detach(), **gradients_of(wanted, expected)}, BOUNDS[dtype])


def test_full_chunks_of_the_usual_size() -> None:
    starts = (0, 150, 279)
    wanted, given = leaves(279), leaves(279, torch.float32)
    check_close({"output": mixed_by(given, starts).detach()}, {"output": slow(wanted, starts).detach()}, 1e-5)


def test_strong_decays_overflow_nothing() -> None:
    """exp(-exp(6) * softplus(9)) is 0 in float32, and its inverse infinite."""
    given = leaves(24, torch.float32)
    given["A_log"] = torch.full((VALUE_HEADS,), 6.0, requires_grad=True)
    given["dt_bias"] = torch.full((VALUE_HEADS,), 9.0, requires_grad=True)
    output = mixed_by(given, (0, 24))
    assert all(tensor.isfinite().all() for tensor in (output, *gradients_of(given, output).values()))


def test_nothing_crosses_a_packed_border() -> None:
    """A sequence is the same to the bit, and gives the same gradients, whatever is packed in front of it and
    behind it."""
    starts, here = (0, 9, 21, 30), slice(9, 21)
    found = []
    for scale in (1.0, -3.0):
        given = leaves(30, torch.float32)
        with torch.no_grad():
            for name in ("inputs", "decay", "step"):
                given[name][:9] *= scale
                given[name][21:] *= scale
        output = mixed_by(given, starts)[here]
        found.append([output, *torch.autograd.grad(output.square().sum(), [given["inputs"], given["A_log"]])])
    for once, again in zip(*found, strict=True):
        assert torch.equal(once, again)
    assert not found[0][1][:9].any() and not found[0][1][21:].any()


def test_steps_go_on_where_chunks_end() -> None:
    given = leaves(11)
    query, key, value = heads_of(F.silu(given["inputs"]))
    decays, steps = log_decays(given["decay"], given["A_log"], given["dt_bias"]), given["step"].sigmoid()
    whole, last = gated_delta_rule(query, key, value, decays, steps, (0, 11))
    before, behind = (
        [tensor[part] for tensor in (query, key, value, decays, steps)]
        for part in (slice(0, 8), slice(8, 11))
    )
    query, key, value, decays, steps = before
    _, state = gated_delta_rule(query, key, value, decays, steps, (0, 8))
    for token in range(8, 11):
        query, key, value, decays, steps = (tensor[None, token - 8] for tensor in behind)
        output, state = gated_delta_step(query, key, value, decays, steps, state)
        torch.testing.assert_close(output[0], whole[token], atol=1e-13, rtol=1e-12)
    torch.testing.assert_close(state, last, atol=1e-13, rtol=1e-12)


@pytest.mark.parametrize(("rows", "length"), [(3, 11), (2, 70), (4, 1)])
def test_rows_that_alternate_are_rows_one_behind_the_other(rows: int, length: int) -> None:
    """To the bit, their gradients as well, but for sums over all tokens."""
    starts = tuple(range(0, rows * length + 1, length))
    apart, alternating = leaves(rows * length, torch.float32), leaves(rows * length, torch.float32)
    by_token = [name for name, tensor in apart.items() if len(tensor) == rows * length]

    def alternate(tensor: Tensor) -> Tensor:
        return tensor.unflatten(0, (rows, length)).transpose(0, 1).flatten(0, 1)

    with torch.no_grad():
        for name in by_token:
            alternating[name].copy_(alternate(apart[name]))
    outputs = [mixed_by(apart, starts), mixed_by(alternating, starts, ALONE, rows)]
    assert torch.equal(alternate(outputs[0]), outputs[1])
    once, again = (
        gradients_of(given, output) for given, output in zip((apart, alternating), outputs, strict=True)
    )
    for name, gradient in once.items():
        if name in by_token:
            assert torch.equal(alternate(gradient), again[name]), name
        else:
            torch.testing.assert_close(gradient, again[name])
