"""The prose of the code keeps the language's rules; ``python -m tests.prose`` prints the figures."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests import prose
from tests.prose import Figures, figures, python_files, split_name

LEAST_COMMENTS = 0.05
"""Comments, of lines of code."""
MOST_COMPREHENSIONS = 18
"""For 1,000 lines of megarl and converters."""


@pytest.fixture(scope="module")
def everything() -> Figures:
    return figures(python_files("megarl", "converters", "benchmarks"))


def test_comprehensions_are_few() -> None:
    product = figures(python_files("megarl", "converters"))
    assert 1000 * product.comprehensions <= MOST_COMPREHENSIONS * product.lines


def test_docstrings_and_comments_keep_the_rules(everything: Figures) -> None:
    assert everything.docstrings > 6000
    assert everything.questions == [] and everything.split_names == []
    assert everything.comments >= LEAST_COMMENTS * everything.code
    wide = everything.wide_text + everything.wide_code
    assert wide == [], f"lines have at most {prose.WIDTH} columns"
    assert everything.words == [], "take the field's words"


def test_documents_use_the_words_of_the_field() -> None:
    assert prose.words_of_documents() == []


def test_words_of_documents_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.md").write_text("As told.\n```\nsaid\n```\n`drawn` is a name, judged is not.\n")
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "b.yaml").write_text("said: 1  # beside\n")
    subprocess.run("git init -q . && git add .", cwd=tmp_path, shell=True, check=True)
    monkeypatch.setattr(prose, "ROOT", tmp_path)
    assert prose.words_of_documents() == ["a.md:1: told", "a.md:5: judged", "configs/b.yaml:1: beside"]


def test_what_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prose, "ROOT", tmp_path)
    path = tmp_path / "module.py"
    path.write_text(
        '"""Whether it counts."""\n'
        "X = 1  # told\n"
        f"# {'wide ' * 30}\n"
        f"Y = '{'wide ' * 30}'\n"
        "class RayWorker:\n"
        '    """Ray worker: what runs."""\n'
        "    z = [x for x in (1, 2)]\n"
    )
    found = figures([path])
    assert (found.docstrings, found.comments, found.code, found.comprehensions) == (2, 2, 4, 1)
    assert found.questions == ["module.py:1: Whether it counts."] and found.split_names == [
        "module.py:6: Ray worker: what runs."
    ]
    assert (
        found.wide_text == ["module.py:3"]
        and found.wide_code == ["module.py:4"]
        and found.words == ["module.py:2: told"]
    )
    assert (
        split_name("RayWorkerBuilder") == "ray worker builder" and split_name("HTTPServer") == "http server"
    )
