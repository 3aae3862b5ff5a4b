"""Recipes: configurations that are shipped with megarl, found by name in a clone and in an installed
package."""

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
"""Subdirectories of the recipe directory; "" is the directory itself."""
_SUFFIXES = frozenset({".yaml", ".yml"})


@dataclass(frozen=True, slots=True)
class Recipe:
    """A shipped configuration: of a whole run, or a file in ``base`` or ``quickstart`` to merge over one.

    Attributes:
        name: name for ``megarl train`` and ``--with``.
        path: path of the YAML file.
        summary: first sentences of the comment at its top.
    """

    name: str
    path: Path
    summary: str


def directory() -> Path:
    """Return the directory of the recipes: ``megarl/recipes`` of an installed package, else ``configs`` of
    the clone."""
    package = Path(megarl.__file__).resolve().parent
    installed = package / "recipes"
    return installed if installed.is_dir() else package.parent / "configs"


def recipes(part: str = "") -> Iterator[Recipe]:
    """Yield the recipes of one of ``PARTS``, sorted by name."""
    for path in sorted((directory() / part).glob("*.yaml")):
        yield Recipe(
            f"{part}/{path.stem}" if part else path.stem, path, _summary(path.read_text(encoding="utf-8"))
        )


def _summary(text: str) -> str:
    """Return the sentences that begin in the first line of a file's first comment, even if they end in a
    later line."""
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
    """Return the file to which a name in ``defaults`` refers: a file relative to ``start`` if it exists,
    else a shipped file."""
    path = start / Path(name).expanduser()
    return path if path.is_file() else _shipped(name) or path


def find(text: str) -> Path:
    """Return the configuration file that a command-line word names: a path, a recipe, or a file in ``base``
    or ``quickstart``. A path need not exist.

    Raises:
        ConfigError: the word is not a path, and there is no such recipe.
    """
    path = Path(text)
    # An existing file takes precedence over a recipe of the same name.
    is_yaml = path.suffix in _SUFFIXES
    if path.is_file() or (is_yaml and path.parent != Path()):
        # The documentation writes recipes as configs/NAME.yaml, which exists only in a clone.
        name = "/".join((*path.parts[:-1], path.stem)).removeprefix("configs/")
        if path.parts[0] == "configs" and not path.exists() and _shipped(name) is not None:
            raise ConfigError(f"{text}: there is no such file here. Fix: write {name}, which is shipped")
        return path
    shipped = _shipped(text)
    if shipped is not None:
        return shipped
    if path.exists() or is_yaml or path.is_absolute():
        # ``load_config`` reports a file that does not exist.
        return path
    names = [recipe.name for part in PARTS for recipe in recipes(part)]
    # A beginning of a name is a better hint than words in it, and these than mere similarity.
    text_of_name = text.lower().removeprefix("configs/")
    near = [each for each in names if each.startswith(text_of_name)]
    if not near:
        words = set(text_of_name.split("-"))
        # Of a path only a very similar name is meant.
        cutoff = 0.3 if len(path.parts) == 1 else 0.8
        similar = difflib.get_close_matches(text_of_name, names, n=len(names), cutoff=cutoff)
        near = sorted(similar, key=lambda name: -len(words & set(name.split("-"))))[:3]
    more = f" or one of {len(near) - 5} more" if len(near) > 5 else ""
    advice = f"did you mean {' or '.join(near[:5])}{more}? " if near else ""
    raise ConfigError(
        f"{text}: there is neither such a file nor such a recipe. Fix: {advice}megarl recipes lists them"
    )


def is_recipe(text: str) -> bool:
    """Return whether a command-line word names an existing YAML file or a shipped configuration."""
    path = Path(text)
    return (path.suffix in _SUFFIXES and path.is_file()) or _shipped(text) is not None


def missing_recipe(words: Iterable[str]) -> Violation:
    """Return the violation for a command line that names no configuration. Its fix proposes the recipes that
    match the other words best."""
    split = re.split(r"[^a-z0-9.]+|\.(?!\d)|(?<=[a-z])(?=\d)", " ".join(words).lower())
    wanted = {part for part in split if len(part) > 1}

    def likeness(recipe: Recipe) -> tuple[int, bool, int]:
        parts = {*recipe.name.split("-"), *re.split(r"-|(?<=[a-z])(?=\d)", recipe.name)}
        # Among equally likely recipes, prefer the simplest.
        return len(parts & wanted), "1gpu" in recipe.name, -recipe.name.count("-")

    likeliest = ", ".join(recipe.name for recipe in sorted(recipes(), key=likeness, reverse=True)[:3])
    fix = f"name one, for example {likeliest}; megarl recipes lists them, and arguments key=value change them"
    return Violation("CONFIG", ABSENT, "neither a recipe nor a YAML file is named", fix)


def name_of(path: Path) -> str:
    """Return the name of a configuration: a recipe's name with its subdirectory, or a file's name without
    ``.yaml``. Names may contain dots."""
    shipped = path.resolve()
    if shipped.is_relative_to(directory()):
        shipped = shipped.relative_to(directory())
        return "-".join([*shipped.parts[:-1], shipped.stem])
    return path.stem if path.suffix in _SUFFIXES else path.name


def misnamed_directory(text: str, run_dir: str) -> str | None:
    """Return the run directory that versions up to 0.1 used for a configuration, if there is a run in it,
    else None.

    Those versions truncated a name at its last dot, so several recipes shared a directory.

    Args:
        text: recipe or file, as written on the command line.
        run_dir: run directory of this launch.
    """
    old = Path("runs") / Path(text).stem
    # os.path, unlike pathlib, returns False for names that no file can have; the run itself refuses them.
    is_misnamed = old != Path(run_dir) and not os.path.exists(run_dir) and os.path.isfile(old / "config.yaml")
    return str(old) if is_misnamed else None


def other_run_of(text: str, run_dir: str) -> str | None:
    """Return the run directory from which a ``config.yaml`` was taken, if it is not that of this launch,
    else None. A copied or renamed run directory has a ``config.yaml`` that still names the earlier one.

    Args:
        text: recipe or file, as written on the command line.
        run_dir: run directory of this launch.
    """
    place = os.path.dirname(text) or os.curdir
    is_stored = os.path.basename(text) == "config.yaml" and os.path.isfile(f"{place}/launches.jsonl")
    # A recipe's name may have a directory that does not exist here, which samefile does not take.
    is_other = is_stored and not (os.path.exists(run_dir) and os.path.samefile(place, run_dir))
    return place if is_other else None


def _shipped(name: str) -> Path | None:
    """Return the shipped file with this name, or None; ``.yaml`` may be left out, and names may contain
    dots."""
    stem = name.removesuffix(".yaml").removesuffix(".yml")
    path = directory() / f"{stem}.yaml"
    return path if stem and path.is_file() else None
