"""Recipes: the configurations that ship with megarl, found by name in a clone and in an installed package."""

from __future__ import annotations

import difflib
import itertools
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import megarl
from megarl.config.schema import ABSENT
from megarl.errors import ConfigError, Violation

PARTS = ("", "quickstart", "base")
"""Directories below that of the recipes."""
_SUFFIXES = frozenset({".yaml", ".yml"})


@dataclass(frozen=True, slots=True)
class Recipe:
    """A shipped configuration: of a whole run, or a file of ``base`` or ``quickstart`` that is laid over one.

    Attributes:
        name: that ``megarl train`` and ``--with`` take.
        path: of its file.
        summary: the first sentences of its first comment.
    """

    name: str
    path: Path
    summary: str


def directory() -> Path:
    """Return the directory of the recipes: ``megarl/recipes`` of an installed package, ``configs`` of a
    clone."""
    package = Path(megarl.__file__).resolve().parent
    installed = package / "recipes"
    return installed if installed.is_dir() else package.parent / "configs"


def recipes(part: str = "") -> Iterator[Recipe]:
    """Yield all recipes, by name; or the files of ``base`` or ``quickstart``."""
    for path in sorted((directory() / part).glob("*.yaml")):
        yield Recipe(
            f"{part}/{path.stem}" if part else path.stem, path, _summary(path.read_text(encoding="utf-8"))
        )


def _summary(text: str) -> str:
    """Return the sentences that begin in the first line of a file's first comment, to their ends, which may
    be further down."""
    lines = [
        line.removeprefix("#").strip()
        for line in itertools.takewhile(lambda line: line.startswith("#"), text.splitlines())
    ]
    if not lines or lines[0].endswith("."):
        return "".join(lines[:1])
    comment = " ".join(lines)
    ends = (end.end() for end in re.finditer(r"\.(?= [A-Z]|$)", comment))
    return comment[: next((end for end in ends if end > len(lines[0])), None)]


def inherited(name: str, start: Path) -> Path:
    """Return the file that ``defaults`` of a configuration in ``start`` name: one relative to it, or else a
    shipped one."""
    path = start / Path(name).expanduser()
    return path if path.is_file() else _shipped(name) or path


def find(text: str) -> Path:
    """Return the file that a command line names: a path, or the name of a recipe or of a file below ``base``
    and ``quickstart``.

    Raises:
        ConfigError: it looks like a name, and there is no such recipe.
    """
    path = Path(text)
    is_yaml = path.suffix in _SUFFIXES
    if path.is_file() or (is_yaml and path.parent != Path()):
        # As the documents write it, from a clone.
        name = "/".join((*path.parts[:-1], path.stem)).removeprefix("configs/")
        if path.parts[0] == "configs" and not path.exists() and _shipped(name) is not None:
            raise ConfigError(f"{text}: there is no such file here. Fix: write {name}, which is shipped")
        return path
    shipped = _shipped(text)
    if shipped is not None:
        return shipped
    if path.exists() or len(path.parts) > 1 or is_yaml:
        # the reader says that there is no such file
        return path
    names = [recipe.name for part in PARTS for recipe in recipes(part)]
    near = [each for each in names if each.startswith(text)] or difflib.get_close_matches(
        text, names, n=3, cutoff=0.3
    )
    advice = f"did you mean {' or '.join(near)}? " if near else ""
    raise ConfigError(
        f"{text}: there is neither such a file nor such a recipe. Fix: {advice}megarl recipes lists them"
    )


def is_recipe(text: str) -> bool:
    """Return whether a word of a command line names a YAML file that is there, or a shipped configuration."""
    path = Path(text)
    return (path.suffix in _SUFFIXES and path.is_file()) or _shipped(text) is not None


def missing_recipe(words: Iterable[str]) -> Violation:
    """Return the violation of a command line without a configuration, with the recipes that are the likeliest
    by its other words."""
    said = {
        part
        for word in words
        for part in re.split(r"[^a-z0-9.]+|\.(?!\d)|(?<=[a-z])(?=\d)", word.lower())
        if len(part) > 1
    }

    def likeness(recipe: Recipe) -> tuple[int, bool, int]:
        parts = {
            part for word in recipe.name.split("-") for part in (word, *re.split(r"(?<=[a-z])(?=\d)", word))
        }
        # of equally likely ones the plainest first
        return len(parts & said), "1gpu" in recipe.name, -recipe.name.count("-")

    likeliest = ", ".join(recipe.name for recipe in sorted(recipes(), key=likeness, reverse=True)[:3])
    fix = f"name one, for example {likeliest}; megarl recipes lists them, and words key=value change them"
    return Violation("CONFIG", ABSENT, "neither a recipe nor a YAML file is named", fix)


def name_of(path: Path) -> str:
    """Return the name of a configuration: that of a recipe with its directory, the file's without its suffix;
    names have dots."""
    shipped = path.resolve()
    if shipped.is_relative_to(directory()):
        shipped = shipped.relative_to(directory())
        return "-".join([*shipped.parts[:-1], shipped.stem])
    return path.stem if path.suffix in _SUFFIXES else path.name


def misnamed_directory(text: str, run_dir: str) -> str | None:
    """Return the run directory that versions up to 0.1 gave what a command line names, where it holds a run;
    None elsewhere.

    They cut a name at its last dot, so that several recipes shared a directory.

    Args:
        text: recipe or file, as the command line names it.
        run_dir: of this launch.
    """
    old = Path("runs") / Path(text).stem
    # os.path takes a name that no file can have for an absent one; the run itself refuses it.
    is_misnamed = old != Path(run_dir) and not os.path.exists(run_dir) and os.path.isfile(old / "config.yaml")
    return str(old) if is_misnamed else None


def _shipped(name: str) -> Path | None:
    """Return the shipped file of a name, with or without its suffix; names have dots of their own."""
    stem = name.removesuffix(".yaml").removesuffix(".yml")
    path = directory() / f"{stem}.yaml"
    return path if stem and path.is_file() else None
