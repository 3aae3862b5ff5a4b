"""What a command loads: nothing that it does not need."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.models import make_tiny
from tests.tiers import sampled

HEAVY = {"torch", "transformers", "ray", "megatron", "datasets"}
READERS = {"omegaconf", "antlr4", "yaml", "rich", "huggingface_hub"}
QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart"
BACKENDS: dict[str, list[str]] = {
    "megatron": [],
    "dtensor": ["--with", str(QUICKSTART / "dtensor.yaml")],
    "fsdp1": ["--with", str(QUICKSTART / "fsdp1.yaml")],
}


def loaded_by(arguments: list[str], packages: set[str]) -> tuple[str, set[str]]:
    """Output of a command, and which of the packages it has loaded at its end."""
    code = (
        "import sys\nfrom megarl.cli import main\n"
        "try:\n    code = main(sys.argv[1:])\nexcept SystemExit as end:\n    code = end.code\n"
        f"sys.stderr.write('loaded ' + ' '.join({packages!r} & set(sys.modules)))\nsys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, set(done.stderr.rpartition("loaded ")[2].split())


@pytest.mark.parametrize(
    "arguments",
    [["--help"], ["--version"], ["recipes"], ["convert", "--help"], ["train", "--help"]],
    ids=" ".join,
)
def test_what_only_speaks_loads_neither_a_model_library_nor_a_reader(arguments: list[str]) -> None:
    assert loaded_by(arguments, HEAVY | READERS)[1] == set()


@sampled(1)
@pytest.mark.parametrize(
    "recipe", ["grpo-qwen2.5-1.5b-megatron", "grpo-qwen3-30b-a3b-2x8gpu-megatron", "sft-qwen2.5-1.5b-dtensor"]
)
def test_a_dry_run_of_a_recipe_loads_neither_torch_nor_transformers(recipe: str) -> None:
    out, loaded = loaded_by(["train", recipe, "--dry-run"], HEAVY)
    assert "ranks:" in out and loaded == set()


@sampled(1)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_dry_run_checks_weights_without_torch(backend: str, tmp_path: Path) -> None:
    model = make_tiny(tmp_path / "model", "qwen2", tied=True, max_position_embeddings=4096)
    arguments = [
        "train",
        str(QUICKSTART / "grpo.yaml"),
        f"policy.model_name={model}",
        "--dry-run",
        *BACKENDS[backend],
    ]
    out, loaded = loaded_by(arguments, HEAVY)
    assert "peak" in out and loaded == set()
