"""The process environment."""

from __future__ import annotations

import pytest

from megarl import env


@pytest.mark.parametrize("before", [None, "was here"])
def test_variables_are_what_they_were_afterwards(monkeypatch: pytest.MonkeyPatch, before: str | None) -> None:
    name = "MEGARL_TEST_OF_VARIABLES"
    monkeypatch.delenv(name, raising=False)
    if before is not None:
        monkeypatch.setenv(name, before)
    with pytest.raises(ZeroDivisionError), env.variables({name: "within"}):
        assert env.text(name) == "within"
        raise ZeroDivisionError
    assert env.snapshot().get(name) == before
