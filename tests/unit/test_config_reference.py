"""The pages of the configuration are current, and name every key that there is."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from megarl.config.algorithms import run_type
from megarl.config.reference import PAGES, updated
from megarl.config.schema import known_paths
from tests.tables import read_table
from tests.tiers import slow

TABLES = read_table("config_reference.yaml")

CONFIGS = Path(__file__).parents[2] / "configs"


@pytest.fixture(scope="module")
def page() -> str:
    return (CONFIGS / "KEYS.md").read_text(encoding="utf-8")


def rows_of(page: str) -> dict[str, tuple[str, str, str]]:
    """Dotted key to value, default and meaning."""
    rows: dict[str, tuple[str, str, str]] = {}
    section = ""
    for line in page.split("<!-- generated: keys -->")[1].splitlines():
        if line.startswith("## "):
            section = line.removeprefix("## ").strip("`")
            section = "" if section == "The top level" else f"{section}."
        elif line.startswith("| `"):
            key, value, default, meaning = re.split(
                r" (?<!\\)\| ", line.removeprefix("| ").removesuffix(" |") + " ", maxsplit=3
            )
            rows[section + key.strip("`")] = (value, default, meaning.strip())
    return rows


@pytest.mark.parametrize("name", PAGES)
def test_the_pages_are_current(name: str) -> None:
    page = (CONFIGS / name).read_text(encoding="utf-8")
    assert updated(page, name, CONFIGS) == page, "run: python -m megarl.config.reference configs"


def test_a_row_has_as_many_cells_as_the_heading() -> None:
    """Recipes with further models have moments of their own."""
    for table in re.findall(
        r"(?:^\|.*\n)+", (CONFIGS / "README.md").read_text(encoding="utf-8"), re.MULTILINE
    ):
        assert len({row.count("|") for row in table.splitlines()}) == 1, table


@slow
def test_the_program_brings_the_pages_up_to_date(tmp_path: Path) -> None:
    """In a process of its own, where nothing was imported before."""
    for path in CONFIGS.glob("*.md"):
        (tmp_path / path.name).write_text(re.sub(r"(?m)^\|.*\n", "", path.read_text(encoding="utf-8")))
    shutil.copytree(CONFIGS, tmp_path, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.md"))
    subprocess.run(
        [sys.executable, "-m", "megarl.config.reference", str(tmp_path)], check=True, cwd=CONFIGS.parent
    )
    keys = [(path / "KEYS.md").read_text(encoding="utf-8") for path in (tmp_path, CONFIGS)]
    assert keys[0] == keys[1]


def test_every_key_is_there_with_its_meaning(page: str) -> None:
    rows = rows_of(page)
    assert set(rows) == set(known_paths(run_type(None)))
    assert [key for key, (_, _, meaning) in rows.items() if not meaning] == []


@pytest.mark.parametrize(
    ("key", "value", "default"),
    TABLES["values and defaults"],
)
def test_values_and_defaults(page: str, key: str, value: str, default: str) -> None:
    shown, default_shown = rows_of(page)[key][:2]
    assert (shown.split("; ")[0], default_shown) == (value, default)


@pytest.mark.parametrize(("name", "table"), PAGES.items())
def test_a_page_without_its_marks_is_refused(name: str, table: str) -> None:
    with pytest.raises(ValueError, match=f"{name} must have the lines .*generated: {table}"):
        updated("no marks", name, CONFIGS)


def test_bounds_stand_beside_the_kind_of_value(page: str) -> None:
    """Here a bound is written out, where a test that reads it from its field could not see that it
    changed."""
    shown = {
        key: rows_of(page)[key][0]
        for key in ("policy.max_total_sequence_length", "policy.generation.top_p", "loss_fn.ratio_clip_c")
    }
    assert shown == {
        "policy.max_total_sequence_length": "whole number; at least 2",
        "policy.generation.top_p": "number; more than 0 and at most 1",
        "loss_fn.ratio_clip_c": "number or null; more than 1",
    }
