"""The versions of constraints-gpu.txt, asked of package indexes: pip resolves each extra with them, and to
nothing else than them.

Nothing is installed and no wheel is downloaded whole. Needs Python 3.12 and a way to a package index.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from packaging.utils import canonicalize_name
from packaging.version import Version

from megarl import env
from tests.launch.test_gpu_environment import CONSTRAINTS, cuda_of_torch, pins, project
from tests.tiers import slow

pytestmark = [slow, pytest.mark.timeout(900)]
NOT_BY_WHEEL = "transformer-engine-torch"
"""Is compiled on the spot, against the torch that is there; no index has a wheel of it, and so what it asks
for is told here."""
ITS_REQUIREMENTS = (
    "einops",
    "nvdlfw-inspect",
    "nvidia-cudnn-frontend>=1.29.0",
    "onnx",
    "onnxscript",
    "packaging",
    "pydantic",
)


def python312() -> str | None:
    """A Python 3.12 with pip; None without one."""
    home = Path(env.text("PYENV_ROOT") or Path.home() / ".pyenv")
    for candidate in (
        shutil.which("python3.12"),
        *sorted(map(str, home.glob("versions/3.12*/bin/python3.12"))),
    ):
        question = "import pip, sys; sys.exit(sys.version_info[:2] != (3, 12))"
        if (
            candidate
            and subprocess.run([candidate, "-c", question], capture_output=True, check=False).returncode == 0
        ):
            return candidate
    return None


@pytest.fixture(scope="module")
def python() -> str:
    found = python312()
    if found is None:
        pytest.skip("no Python 3.12 with pip here")
    return found


def resolve(python: str, *requirements: str, constrained: bool = True) -> dict[str, Version]:
    """What pip would install into an empty environment, by wheels alone, by name.

    pip's files of configuration are left out, as they may name an index with CPU builds; its variables
    (``PIP_INDEX_URL``) count.
    """
    command = [
        python,
        "-m",
        "pip",
        "install",
        "--dry-run",
        "--ignore-installed",
        "--only-binary=:all:",
        "--quiet",
        "--report",
        "-",
    ]
    options = [
        "--disable-pip-version-check",
        "--no-input",
        *(["--constraint", str(CONSTRAINTS)] if constrained else []),
    ]
    variables = {**env.snapshot(), "PIP_CONFIG_FILE": os.devnull}
    done = subprocess.run(
        [*command, *options, *requirements], env=variables, capture_output=True, text=True, check=False
    )
    if "No matching distribution" in done.stderr and "from versions: none" in done.stderr:
        pytest.skip(f"no package index can be reached: {done.stderr.strip().splitlines()[-1]}")
    assert done.returncode == 0, done.stderr[-4000:]
    told: dict[str, Any] = json.loads(done.stdout)
    return {
        canonicalize_name(one["metadata"]["name"]): Version(one["metadata"]["version"])
        for one in told["install"]
    }


@pytest.mark.parametrize("extras", ["", "vllm", "plot vllm wandb tensorboard test"])
def test_extras_resolve_to_the_versions_that_are_written_down(python: str, extras: str) -> None:
    wanted = [*project()[""], *(requirement for extra in extras.split() for requirement in project()[extra])]
    found = resolve(python, *wanted)
    assert {name: version for name, version in found.items() if pins().get(name) != version} == {}, (
        "write them into constraints-gpu.txt"
    )


def test_transformer_engine_resolves_but_for_what_is_compiled(python: str) -> None:
    version = pins()["transformer-engine"]
    wanted = (
        f"transformer-engine-cu{cuda_of_torch()}=={version}",
        f"transformer-engine=={version}",
        f"torch=={pins()['torch']}",
    )
    found = resolve(python, *wanted, *ITS_REQUIREMENTS)
    assert (
        found["transformer-engine"]
        == found[f"transformer-engine-cu{cuda_of_torch()}"]
        == version
        == pins()[NOT_BY_WHEEL]
    )
    assert {name: version for name, version in found.items() if pins().get(name) != version} == {}
