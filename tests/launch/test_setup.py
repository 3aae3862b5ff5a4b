"""What pyproject.toml and setup.py promise: the command, the extras, recipes, and pins that satisfy every
requirement."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

import megarl
from megarl import env

ROOT = Path(__file__).parents[2]


@pytest.fixture
def project() -> dict[str, Any]:
    """The ``project`` table of pyproject.toml."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def pins() -> dict[str, str]:
    lines = [
        line
        for line in (ROOT / "constraints-cpu.txt").read_text().splitlines()
        if line and not line.startswith("#")
    ]
    pairs = [line.split("==") for line in lines]
    assert all(len(pair) == 2 for pair in pairs), "a constraint is a name and one exact version"
    assert len({canonicalize_name(name) for name, _ in pairs}) == len(pairs)
    return {canonicalize_name(name): version for name, version in pairs}


def test_every_requirement_is_pinned_inside_its_bounds(project: dict[str, Any]) -> None:
    wanted = [
        Requirement(text)
        for text in (
            *project["dependencies"],
            *project["optional-dependencies"]["plot"],
            *project["optional-dependencies"]["test"],
        )
    ]
    for requirement in wanted:
        version = pins().get(canonicalize_name(requirement.name))
        assert version is not None, f"{requirement.name} has no pin in constraints-cpu.txt"
        assert requirement.specifier.contains(version), f"{requirement} does not allow the pinned {version}"


def test_bounds_that_other_versions_break(project: dict[str, Any]) -> None:
    bounds = {
        requirement.name: requirement.specifier for requirement in map(Requirement, project["dependencies"])
    }
    assert not bounds["transformers"].contains("5.20.0")
    assert not bounds["megatron-core"].contains("0.20.0")
    assert bounds["megatron-core"].contains("0.19.2")


@pytest.mark.parametrize("package", ["torch", "vllm", "vllm-cpu"])
def test_upper_bounds_are_those_of_the_versions_that_are_tested(
    package: str, project: dict[str, Any]
) -> None:
    """An install without a constraints file takes no minor version that nobody tried."""
    texts = [
        *project["dependencies"],
        *(text for extra in project["optional-dependencies"].values() for text in extra),
    ]
    [specifier] = {one.specifier for one in map(Requirement, texts) if one.name == package}
    files = [(ROOT / name).read_text() for name in ("constraints-cpu.txt", "constraints-gpu.txt")]
    tested = {
        Version(version)
        for text in files
        for version in re.findall(rf"^{package}==([\d.]+)$", text, re.MULTILINE)
    }
    newest = max(tested)
    assert all(specifier.contains(version) for version in tested)
    assert not specifier.contains(f"{newest.major}.{newest.minor + 1}.0")


def test_the_pythons_for_which_all_packages_have_wheels(project: dict[str, Any]) -> None:
    """The scripts, the distribution and its classifiers name the same ones."""
    allowed = [
        f"3.{minor}"
        for minor in range(9, 20)
        if SpecifierSet(project["requires-python"]).contains(f"3.{minor}.0")
    ]
    assert allowed == ["3.11", "3.12", "3.13"]
    assert [
        line.rpartition(" ")[2] for line in project["classifiers"] if re.search(r":: 3\.\d+$", line)
    ] == allowed
    script = (ROOT / "launch" / "environment.sh").read_text()
    assert f"for candidate in {' '.join(f'python{version}' for version in allowed)} python3; do" in script
    assert "(3, 11) <= sys.version_info[:2] <= (3, 13)" in script


def test_command_and_extras(project: dict[str, Any]) -> None:
    assert project["scripts"] == {"megarl": "megarl.cli:main"}
    assert project["entry-points"] == {
        "vllm.general_plugins": {"megarl": "megarl.models.generation.vllm.plugin:register"}
    }
    assert set(project["optional-dependencies"]) == {
        *("te", "vllm", "vllm-cpu", "wandb", "mlflow", "trackio", "tensorboard", "plot", "test", "bench")
    }


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel of the tracked files, installed into a directory of its own."""
    work = tmp_path_factory.mktemp("wheel")
    tracked = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split("\0")
    for name in filter(None, tracked):
        if name.split("/")[0] in {"megarl", "converters", "configs"} or name in {
            "setup.py",
            "pyproject.toml",
            "README.md",
            "LICENSE",
        }:
            (work / "source" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, work / "source" / name)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    options = ["--no-deps", "--no-index", "--quiet"]
    subprocess.run(
        [*pip, "wheel", *options, "--no-build-isolation", "--wheel-dir", str(work), str(work / "source")],
        check=True,
    )
    [wheel] = work.glob("*.whl")
    assert wheel.name.startswith(f"megarl_trainer-{megarl.__version__}-")
    subprocess.run([*pip, "install", *options, "--target", str(work / "installed"), str(wheel)], check=True)
    shutil.rmtree(work / "source")
    return work / "installed"


def run_installed(installed: Path, directory: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run a module of the installed package from an empty directory."""
    directory.mkdir()
    variables = env.snapshot() | {"PYTHONPATH": str(installed)}
    return subprocess.run(
        [sys.executable, "-m", *words],
        cwd=directory,
        env=variables,
        capture_output=True,
        text=True,
        check=False,
    )


def test_every_package_directory_is_installed(installed: Path) -> None:
    tracked = {
        path.relative_to(ROOT) for top in ("megarl", "converters") for path in (ROOT / top).rglob("*.py")
    }
    there = {
        path.relative_to(installed)
        for top in ("megarl", "converters")
        for path in (installed / top).rglob("*.py")
    }
    assert tracked == there, "a directory with modules lacks its __init__.py"
    recipes = {path.relative_to(ROOT / "configs") for path in (ROOT / "configs").rglob("*.yaml")}
    assert recipes == {
        path.relative_to(installed / "megarl" / "recipes")
        for path in (installed / "megarl" / "recipes").rglob("*.yaml")
    }
    assert not (installed / "tests").exists() and not (installed / "configs").exists()


def test_the_page_of_a_package_index_links_to_no_file_of_the_clone(installed: Path) -> None:
    [metadata] = installed.glob("megarl_trainer-*.dist-info/METADATA")
    page = metadata.read_text(encoding="utf-8")
    assert "Description-Content-Type: text/markdown" in page and "## Install" in page
    assert "](" in (ROOT / "README.md").read_text() and not re.findall(r"\]\((?!https?://|#)[^)]*\)", page)


def test_an_installed_package_knows_its_recipes(installed: Path, tmp_path: Path) -> None:
    listed = run_installed(installed, tmp_path / "a", "megarl", "recipes", "--json")
    assert listed.returncode == 0, listed.stderr
    found = json.loads(listed.stdout)
    files = [path.relative_to(ROOT / "configs") for path in (ROOT / "configs").rglob("*.yaml")]
    assert {recipe["name"] for recipe in found} == {str(path.with_suffix("")) for path in files}
    assert all(
        Path(recipe["path"]).is_relative_to(installed) and len(recipe["summary"]) > 20 for recipe in found
    )
    name = "grpo-qwen2.5-7b-8gpu-megatron"
    dry = run_installed(installed, tmp_path / "b", "megarl", "train", name, "--dry-run")
    assert dry.returncode == 0, dry.stderr
    assert "tensor_model_parallel_size: 2" in dry.stdout and "memory" in dry.stdout
    unknown = run_installed(installed, tmp_path / "c", "megarl", "train", "grpo-qwen2.5-7b", "--dry-run")
    assert unknown.returncode == 2 and f"did you mean {name}" in unknown.stderr


# enough supervised steps for some right answers
STEPS = {"sft": 60, "grpo": 2}


# forty seconds: the first thing that a newcomer does, and a whole program that trains on two ranks
def test_the_first_steps_of_the_quickstart(installed: Path, tmp_path: Path) -> None:
    """SFT, GRPO, plot, and an export that plain transformers scores alike; from an installed package, with
    nothing of the clone at hand."""
    words = ("megarl.quickstart", "--steps", *map(str, STEPS.values()), "--out", "out")
    done = run_installed(installed, tmp_path / "empty", *words)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert {path.name for path in (tmp_path / "empty").iterdir()} == {"out"}
    directory = tmp_path / "empty" / "out" / "seed-1"
    for part, steps in STEPS.items():
        assert str(ROOT) not in (directory / part / "config.yaml").read_text()
        rows = [json.loads(line) for line in (directory / part / "metrics.jsonl").read_text().splitlines()]
        assert [row["step"] for row in rows if row["step"]] == list(range(1, steps + 1))
    summary = json.loads((directory / "summary.json").read_text())
    assert 0 < summary["accuracy_transformers"] == summary["accuracy_after"] < 1
    assert (tmp_path / "empty" / summary["plot"]).stat().st_size > 10_000
    assert f"Hugging Face model: {summary['model']}" in done.stdout.replace("\n", "")
