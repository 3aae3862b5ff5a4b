"""Random losses: what is asked for is there, every option is drawn with every number of it, and the rules
refuse none."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from megarl.parity.case import Case
from megarl.parity.coverage import features
from megarl.parity.draw_loss import draw_loss
from megarl.parity.lines import parse
from megarl.parity.options import ADVANTAGES, LOSSES, split
from megarl.parity.possible import _own_violations

DRAWN = [draw_loss(random.Random(number)) for number in range(2000)]


def test_what_is_drawn_is_possible_and_survives_its_line() -> None:
    for fields in DRAWN:
        case = replace(Case(mbs=2), **fields)
        assert _own_violations(case) == [] and parse(str(case)) == case, fields
        assert features(case), fields


def test_every_option_is_drawn_with_every_number() -> None:
    for table, field in ((LOSSES, "loss"), (ADVANTAGES, "advantages")):
        seen = {
            (kind, option, numbers)
            for kind, options in (split(fields[field]) for fields in DRAWN)
            for option, numbers in options.items()
        }
        for kind, options in table.items():
            for option, listed in options.items():
                numbers = {numbers for one, other, numbers in seen if (one, other) == (kind, option)}
                assert numbers >= set(listed[1:]) and numbers, (kind, option)


@pytest.mark.parametrize(
    ("loss", "advantages"),
    [
        ("pg+seq+constant:2.5", None),
        ("pg+gspo-token", None),
        ("pg+in-reward", None),
        ("pg", "gae+white"),
        ("pg+cispo+cliprange:1:0.28", "gdpo"),
        ("dpo+ipo", None),
        ("distill+renorm", None),
    ],
)
def test_what_is_asked_for_is_there_with_others_beside_it(loss: str, advantages: str | None) -> None:
    kind, wanted = split(loss)
    drawn = [draw_loss(random.Random(number), loss, advantages) for number in range(40)]
    for fields in drawn:
        found = split(fields["loss"])
        assert found[0] == kind and all(
            option in found[1] and found[1][option] == (numbers or found[1][option])
            for option, numbers in wanted.items()
        )
        if advantages is not None:
            assert set(advantages.split("+")) <= set(fields["advantages"].split("+"))
    assert len({fields["loss"] for fields in drawn}) > 5


@pytest.mark.parametrize(
    "never",
    [
        *(
            {"noratio", "dual"},
            {"k2", "pathwise"},
            {"k1", "pathwise"},
            {"gspo", "constant"},
            {"gspo-token", "seq-mask"},
            {"in-reward", "approx"},
        ),
        *(
            {"forced", "cliprange"},
            {"noratio", "cliprange"},
            {"cispo", "gspo"},
            {"raw", "sample"},
            {"in-reward", "gdpo"},
            {"value", "white"},
        ),
    ],
)
def test_what_would_do_nothing_is_not_drawn(never: set[str]) -> None:
    for fields in DRAWN:
        names = {word.partition(":")[0] for field in fields.values() for word in field.split("+")}
        assert not never <= names, fields


def test_options_are_of_something() -> None:
    for fields in DRAWN:
        (_, options), (estimator, _) = split(fields["loss"]), split(fields["advantages"])
        assert "kl" in options or not {
            "approx",
            "k1",
            "k2",
            "pathwise",
            "kl-input-clamp",
            "kl-output-clamp",
        } & set(options), fields
        assert "is" in options or not {"tis", "icepop", "seq-mask"} & set(options), fields
        if "gspo-token" in options:
            assert estimator in ("given", "gae", "teacher") or "in-reward" in options, fields
        if "forced" in options and {"gspo", "gspo-token"} & set(options):
            assert "is" in options, fields
