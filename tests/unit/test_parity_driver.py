"""What a driver makes of rewards, of values and of a teacher's log-probabilities is what the reference makes
of them."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from megarl.parity.batches import REWARDS, token_batch, with_signals
from megarl.parity.case import MASKS, Case
from megarl.parity.draw_loss import draw_loss
from megarl.parity.jobs import with_signals_made
from megarl.parity.options import ADVANTAGES

MADE = [("pg", kind) for kind in list(ADVANTAGES)[1:]] + [
    ("value", "gae"),
    ("pg+in-reward", "gae"),
    ("pg+in-reward", "reinforce"),
]


@pytest.mark.parametrize(("loss", "advantages"), [*MADE, ("pg+in-reward", "grpo"), ("pg+in-reward", "rloo")])
def test_the_same_advantages_or_returns(loss: str, advantages: str) -> None:
    generator = random.Random(f"{loss} {advantages}")
    for number in range(12):
        sizes = {
            "mbs": generator.choice((1, 2, 4)),
            "micro": generator.choice((1, 2, 3)),
            "length": generator.choice((3, 9)),
        }
        drawn = draw_loss(generator, loss, advantages)
        case = replace(
            Case(seed=number, masked=MASKS[number % 4], together=number % 3 == 0), **sizes, **drawn
        )
        batch = with_signals(case, token_batch(case), -torch.rand(case.total_rows, case.length))
        made = with_signals_made(case, batch)
        assert not set(REWARDS) & set(made)
        counts = (batch["token_mask"] * batch["sample_mask"][:, None]) != 0
        for name in ("prev_values", "returns") if case.loss_kind == "value" else ("advantages",):
            assert made[name].dtype == torch.float32
            torch.testing.assert_close(
                made[name].where(counts, 0.0),
                batch[name].where(counts, 0.0),
                rtol=2e-5,
                atol=2e-6,
                msg=str(case),
            )
        signals = torch.stack(
            [batch[name][counts] for name in ("returns" if case.loss_kind == "value" else "advantages",)]
        )
        assert number or signals.abs().max() > 0.01


@pytest.mark.parametrize(
    ("loss", "advantages"),
    [
        *(("pg", kind) for kind in ("grpo", "rloo", "gdpo", "reinforce-baseline")),
        ("pg+kl+k1+in-reward", "rloo"),
    ],
)
def test_answers_that_are_not_trained_on_are_in_their_groups(loss: str, advantages: str) -> None:
    """Some rows of a batch have a reward and are masked, and advantages are others where they leave their
    groups."""
    case = Case(seed=3, masked="some", mbs=4, micro=3, length=9, loss=loss, advantages=advantages)
    assert case.compares_answers
    batch = with_signals(case, token_batch(case), -torch.rand(case.total_rows, case.length))
    left_out = (batch["rewarded"] != 0) & (batch["sample_mask"] == 0)
    assert left_out.any() and (batch["rewarded"] == 0).any()
    alone = with_signals_made(case, {**batch, "rewarded": batch["sample_mask"]})
    counts = (batch["token_mask"] * batch["sample_mask"][:, None]) != 0
    assert float((alone["advantages"] - batch["advantages"])[counts].abs().max()) > 0.01


@pytest.mark.parametrize("seed", range(20))
def test_some_rows_of_every_step_count_unless_all_are_masked(seed: int) -> None:
    case = Case(seed=seed, masked="some", mbs=1, micro=2, pp=2, vpp=2, layers=4, steps=4)
    by_step = token_batch(case)["sample_mask"].view(case.steps, case.global_batch)
    assert bool((by_step.sum(1) > 0).all())
    assert not token_batch(replace(case, masked="all"))["sample_mask"][: case.global_batch].any()
