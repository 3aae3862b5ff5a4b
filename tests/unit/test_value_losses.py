"""Losses of values and generalized advantages against loops in float64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megarl.algorithms.advantages import generalized_advantages, values_before
from megarl.algorithms.interfaces import LossFunction, check_loss
from megarl.algorithms.loss_functions import NLLLoss
from megarl.algorithms.value_losses import PreferenceLoss, ValueLoss, last_values
from megarl.errors import BatchError, ConfigError
from megarl.observe.metrics import Reduction


def drawn(seed: int, rows: int, length: int) -> dict[str, Tensor]:
    """A batch in float64 with masks that leave out tokens, rows, one of a pair and, with luck, all of a
    row."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, length + 1, (rows,), generator=generator)
    inside = torch.arange(length)[None] < lengths[:, None]
    columns = {
        name: torch.randn(rows, length, generator=generator, dtype=torch.float64)
        for name in ("values", "returns", "prev_values")
    }
    token_mask = ((torch.rand(rows, length, generator=generator) < 0.6) & inside).double()
    sample_mask = (torch.rand(rows, generator=generator) < 0.8).double()
    return {"input_lengths": lengths, "token_mask": token_mask, "sample_mask": sample_mask, **columns}


def slow_preference(batch: dict[str, Tensor], sequences: float) -> dict[str, float]:
    sums = dict.fromkeys(("loss", "accuracy", "margin", "rewards_chosen_mean", "rewards_rejected_mean"), 0.0)
    pairs = 0
    for row in range(0, len(batch["sample_mask"]), 2):
        if batch["sample_mask"][row] * batch["sample_mask"][row + 1] == 0:
            continue
        pairs += 1
        values = batch["values"].detach()
        chosen, rejected = (
            float(values[each, int(batch["input_lengths"][each]) - 1]) for each in (row, row + 1)
        )
        margin = chosen - rejected
        sums["loss"] += math.log1p(math.exp(-margin)) if margin > 0 else math.log1p(math.exp(margin)) - margin
        sums["accuracy"] += margin > 0
        sums["margin"] += margin
        sums["rewards_chosen_mean"] += chosen
        sums["rewards_rejected_mean"] += rejected
    return {**{name: total / (sequences / 2) for name, total in sums.items()}, "num_valid_samples": pairs}


@given(seed=st.integers(0, 10**6), pairs=st.integers(1, 5), length=st.integers(1, 7))
@settings(max_examples=100)
def test_preference_loss_equals_the_loop(seed: int, pairs: int, length: int) -> None:
    batch = drawn(seed, 2 * pairs, length)
    values = batch["values"].requires_grad_()
    # of a micro-batch: the global batch has more
    loss, metrics = PreferenceLoss()(batch, torch.tensor(14.0), torch.tensor(1.0), values=values)
    expected = slow_preference(batch, 14.0)
    assert metrics.keys() == expected.keys() == PreferenceLoss.metric_reductions.keys()
    for name, value in expected.items():
        assert float(metrics[name]) == pytest.approx(value, rel=1e-12, abs=1e-12), name
    assert float(loss.detach()) == pytest.approx(expected["loss"], rel=1e-12, abs=1e-12)
    loss.backward()
    assert values.grad is not None
    for row in range(2 * pairs):
        pair, last = row - row % 2, int(batch["input_lengths"][row]) - 1
        counts = float(batch["sample_mask"][pair] * batch["sample_mask"][pair + 1])
        chosen, rejected = last_values(values.detach(), batch["input_lengths"])[pair : pair + 2].tolist()
        slope = -counts / (1 + math.exp(chosen - rejected)) / 7 * (1 if row % 2 == 0 else -1)
        assert float(values.grad[row, last]) == pytest.approx(slope, rel=1e-12, abs=1e-15)
        assert values.grad[row].count_nonzero() <= 1


@given(
    seed=st.integers(0, 10**6),
    rows=st.integers(1, 5),
    length=st.integers(2, 7),
    clip=st.none() | st.floats(0.01, 2),
)
@settings(max_examples=100)
def test_value_loss_equals_the_loop(seed: int, rows: int, length: int, clip: float | None) -> None:
    batch = drawn(seed, rows, length)
    values = batch["values"].requires_grad_()
    loss, metrics = ValueLoss(clip)(batch, torch.tensor(1.0), torch.tensor(17.0), values=values)
    expected = clipped = 0.0
    slopes = torch.zeros_like(values)
    for row in range(rows):
        for token in range(1, length):
            if batch["token_mask"][row, token] * batch["sample_mask"][row] == 0:
                continue
            value, old, target = (
                float(values[row, token - 1]),
                float(batch["prev_values"][row, token]),
                float(batch["returns"][row, token]),
            )
            near = (
                value
                if clip is None or abs(value - old) <= clip
                else old + min(max(value - old, -clip), clip)
            )
            expected += max((value - target) ** 2, (near - target) ** 2) / 2 / 17
            clipped += ((near - target) ** 2 > (value - target) ** 2) / 17
            if (near - target) ** 2 <= (value - target) ** 2:
                slopes[row, token - 1] = (value - target) / 17
            elif near == value:
                slopes[row, token - 1] = (near - target) / 17
    assert float(loss.detach()) == pytest.approx(expected, rel=1e-12, abs=1e-14)
    assert float(metrics["clipped_share"]) == pytest.approx(clipped, rel=1e-12, abs=1e-14)
    loss.backward()
    assert values.grad is not None
    torch.testing.assert_close(values.grad, slopes, rtol=1e-12, atol=1e-14)


def test_what_is_masked_may_be_anything() -> None:
    """Returns and values where nothing counts may be NaN, as a batch of a run has it where nobody asked."""
    batch = drawn(3, 4, 6)
    mask = batch["token_mask"] * batch["sample_mask"][:, None]
    for name in ("returns", "prev_values"):
        batch[name] = torch.where(mask != 0, batch[name], torch.nan)
    values = batch["values"].requires_grad_()
    loss, _ = ValueLoss(0.1)(batch, torch.tensor(1.0), torch.tensor(9.0), values=values)
    loss.backward()
    assert values.grad is not None and bool(torch.isfinite(loss)) and bool(torch.isfinite(values.grad).all())


@pytest.mark.parametrize("pieces", [(2, 2, 2), (4, 2), (2, 4)])
def test_micro_batches_add_up(pieces: tuple[int, ...]) -> None:
    """A loss normalised by micro-batch would depend on how the batch is cut."""
    batch = drawn(11, 6, 5)
    sequences, tokens = (
        batch["sample_mask"].sum(),
        (batch["token_mask"][:, 1:] * batch["sample_mask"][:, None]).sum(),
    )
    for loss_fn in (PreferenceLoss(), ValueLoss(0.3)):
        whole, metrics = loss_fn(batch, sequences, tokens, values=batch["values"])
        sums: dict[str, float] = dict.fromkeys(metrics, 0.0)
        total, start = 0.0, 0
        for rows in pieces:
            part = {name: column[start : start + rows] for name, column in batch.items()}
            loss, found = loss_fn(part, sequences, tokens, values=part["values"])
            total, start = total + float(loss), start + rows
            sums = {name: sums[name] + float(value) for name, value in found.items()}
        assert total == pytest.approx(float(whole), rel=1e-12)
        assert sums == pytest.approx({name: float(value) for name, value in metrics.items()}, rel=1e-12)
        assert set(loss_fn.metric_reductions.values()) == {Reduction.SUM}


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_pair_that_does_not_count_may_hold_anything(value: float) -> None:
    outcomes = []
    for hidden in (0.0, value):
        values = torch.randn(6, 4, generator=torch.Generator().manual_seed(8), dtype=torch.float64)
        # of the second pair no row counts, of the third one
        values[[2, 3, 4, 5]] = hidden
        batch: Any = {
            "sample_mask": torch.tensor([1.0, 1, 0, 0, 1, 0]),
            "input_lengths": torch.tensor([2, 4, 1, 3, 4, 2]),
        }
        values.requires_grad_()
        loss, metrics = PreferenceLoss()(batch, torch.tensor(3.0), torch.tensor(9.0), values)
        outcomes.append(
            (loss.detach(), torch.autograd.grad(loss, values)[0], metrics["rewards_rejected_mean"])
        )
    for clean, found in zip(*outcomes, strict=True):
        assert torch.equal(clean, found) and bool(clean.any())


def test_equal_scores_are_not_right() -> None:
    batch: Any = {"sample_mask": torch.ones(2), "input_lengths": torch.tensor([2, 1])}
    loss, metrics = PreferenceLoss()(
        batch, torch.tensor(2.0), torch.tensor(0.0), values=torch.tensor([[9.0, 0.5], [0.5, 9.0]])
    )
    assert float(loss) == pytest.approx(math.log(2)) and metrics["accuracy"] == 0 and metrics["margin"] == 0


def test_what_a_loss_of_values_is_called_with() -> None:
    for loss_fn in (PreferenceLoss(), ValueLoss()):
        assert isinstance(loss_fn, LossFunction)
        check_loss(loss_fn, scores=True)
        with pytest.raises(
            ConfigError,
            match=r"a loss of values, for a scoring model, and this model gives "
            r"log-prob.*reward_model_cfg",
        ):
            check_loss(loss_fn)
    with pytest.raises(
        ConfigError,
        match=r"NLLLoss: it is a loss of log-probabilities, for a language model, and this model gives "
        r"values",
    ):
        check_loss(NLLLoss(), scores=True)

    class WithoutValues(PreferenceLoss):
        def __call__(self, data: Any, sequences: Any, tokens: Any) -> Any:  # type: ignore[override]
            raise NotImplementedError

    with pytest.raises(ConfigError, match=r"global_valid_toks, values\)"):
        check_loss(WithoutValues(), scores=True)


@pytest.mark.parametrize(
    ("loss_fn", "changes", "said"),
    [
        (PreferenceLoss(), {"input_lengths": None}, "needs the key 'input_lengths'"),
        (PreferenceLoss(), {"sample_mask": torch.ones(3)}, r"'sample_mask' has shape \[3\], expected \[4\]"),
        (ValueLoss(), {"returns": torch.ones(4, 5)}, r"'returns' has shape \[4, 5\], expected \[4, 6\]"),
        (ValueLoss(), {"prev_values": None}, "needs the key 'prev_values'"),
    ],
)
def test_batches_that_do_not_fit(loss_fn: Any, changes: dict[str, Any], said: str) -> None:
    batch = {name: column for name, column in {**drawn(0, 4, 6), **changes}.items() if column is not None}
    with pytest.raises(BatchError, match=said):
        loss_fn(batch, torch.tensor(1.0), torch.tensor(1.0), values=batch["values"])


def test_bad_bounds_and_half_a_pair() -> None:
    with pytest.raises(ConfigError, match="value_clip = 0"):
        ValueLoss(0)
    batch = drawn(0, 3, 4)
    with pytest.raises(BatchError, match="3 rows, need an even number"):
        PreferenceLoss()(batch, torch.tensor(1.0), torch.tensor(1.0), values=batch["values"])


# generalized advantages


def slow_advantages(
    rewards: list[float],
    values: list[float],
    mask: list[float],
    discount: float,
    gae_lambda: float,
    after: float,
) -> tuple[list[float], list[float]]:
    """Each advantage as the sum of all later changes, which are looked up forwards, without a recursion."""
    places = [place for place, counts in enumerate(mask) if counts]
    states = [values[place] for place in places] + [after]
    changes = [rewards[place] + discount * states[k + 1] - states[k] for k, place in enumerate(places)]
    advantages, returns = [0.0] * len(mask), [0.0] * len(mask)
    for k, place in enumerate(places):
        advantages[place] = sum(
            (discount * gae_lambda) ** (later - k) * changes[later] for later in range(k, len(places))
        )
        returns[place] = advantages[place] + values[place]
    return advantages, returns


@given(
    seed=st.integers(0, 10**6),
    rows=st.integers(1, 4),
    length=st.integers(1, 9),
    discount=st.sampled_from([0.0, 0.9, 1.0]),
    gae_lambda=st.sampled_from([0.0, 0.95, 1.0]),
    cut_off=st.booleans(),
)
@settings(max_examples=150)
def test_advantages_equal_the_sum(
    seed: int, rows: int, length: int, discount: float, gae_lambda: float, cut_off: bool
) -> None:
    batch = drawn(seed, rows, length)
    rewards, values, mask = batch["returns"], batch["values"], batch["token_mask"]
    after = batch["prev_values"][:, 0] if cut_off else None
    hidden = [torch.where(mask != 0, column, torch.nan) for column in (rewards, values)]
    advantages, returns = generalized_advantages(
        *hidden, mask, discount=discount, gae_lambda=gae_lambda, after_end=after
    )
    assert advantages.dtype == returns.dtype == torch.float64
    for row in range(rows):
        end = 0.0 if after is None else float(after[row])
        expected = slow_advantages(
            rewards[row].tolist(), values[row].tolist(), mask[row].tolist(), discount, gae_lambda, end
        )
        for found, wanted in zip((advantages, returns), expected, strict=True):
            assert found[row].tolist() == pytest.approx(wanted, rel=1e-12, abs=1e-12)


def test_with_full_traces_the_return_is_the_sum_of_rewards_to_come() -> None:
    """Whatever the values are; and without any, an advantage is one step of temporal difference."""
    rewards, values = (
        torch.tensor([[1.0, 2.0, 0.0, 4.0]]),
        torch.randn(1, 4, generator=torch.Generator().manual_seed(1)),
    )
    mask = torch.tensor([[1.0, 1.0, 0.0, 1.0]])
    _, returns = generalized_advantages(rewards, values, mask, discount=1.0, gae_lambda=1.0)
    assert returns.tolist() == [pytest.approx([7.0, 6.0, 0.0, 4.0])]
    advantages, _ = generalized_advantages(rewards, values, mask, discount=1.0, gae_lambda=0.0)
    v = values[0].double().tolist()
    assert advantages[0].tolist() == pytest.approx([1 + v[1] - v[0], 2 + v[3] - v[1], 0.0, 4 - v[3]])


def test_the_state_before_a_token_is_what_is_said_at_the_one_before_it() -> None:
    assert values_before(torch.tensor([[1.0, 2.0, 3.0]])).tolist() == [[0.0, 1.0, 2.0]]
