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


def test_a_variable_by_which_a_file_could_run_code_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    [name] = env.UNSAFE
    monkeypatch.setenv(name, "1")
    assert env.forget_unsafe() == [name] and name not in env.snapshot()
    assert env.forget_unsafe() == []
