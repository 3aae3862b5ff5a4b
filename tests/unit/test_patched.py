"""Attributes replaced for a block: each owner is afterwards as it was, whatever held the attribute."""

from __future__ import annotations

import pytest

from megarl.patched import patched


class Base:
    def said(self) -> str:
        return "base"

    @staticmethod
    def fixed() -> str:
        return "fixed"


class Heir(Base): ...


def test_owner_holds_afterwards_what_it_held_itself() -> None:
    one = Heir()
    before = {owner: dict(vars(owner)) for owner in (Base, Heir)}
    with patched(
        (one, "said", lambda: "object"),
        (Heir, "said", lambda self: "heir"),
        (Base, "fixed", staticmethod(lambda: "other")),
    ):
        assert (one.said(), Heir().said(), Base().said(), Heir.fixed()) == ("object", "heir", "base", "other")
    assert (one.said(), Heir().said(), Heir.fixed(), one.fixed()) == ("base", "base", "fixed", "fixed")
    assert vars(one) == {}
    assert {owner: dict(vars(owner)) for owner in (Base, Heir)} == before


def test_same_attribute_twice_and_an_error() -> None:
    one = Heir()
    with pytest.raises(ZeroDivisionError), patched((one, "x", 1), (one, "x", 2)):
        assert one.x == 2  # type: ignore[attr-defined]
        raise ZeroDivisionError
    assert not hasattr(one, "x")


def test_owner_that_refuses_takes_nothing_with_it() -> None:
    one = Heir()
    with pytest.raises(TypeError), patched((one, "x", 1), (int, "x", 2)):
        pytest.fail("entered")
    assert vars(one) == {}
