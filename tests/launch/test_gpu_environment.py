"""The environment for GPUs: its script with stand-ins for pip, driver and compiler; its versions, and the
image that is made by it."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from tests.launch.fake_python import write_fake_python
from tests.launch.test_scripts import ROOT, Clone, make_clone
from tests.tiers import sampled, slow

CONSTRAINTS = ROOT / "constraints-gpu.txt"
SMI = '#!/bin/sh\necho "$FAKE_DRIVER"\n'
NVCC = '#!/bin/sh\necho "Cuda compilation tools, release $FAKE_CUDA, V$FAKE_CUDA.1"\n'


def pins() -> dict[str, Version]:
    lines = [line for line in CONSTRAINTS.read_text().splitlines() if line and not line.startswith("#")]
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.+]+", line) for line in lines), (
        "a constraint is a name and one exact version"
    )
    found = {
        canonicalize_name(name): Version(version)
        for name, _, version in (line.partition("==") for line in lines)
    }
    assert len(found) == len(lines)
    return found


def tool(clone: Clone, name: str, text: str) -> None:
    path = Path(clone.variables["PATH"].split(":")[0]) / name
    path.write_text(text)
    path.chmod(0o755)


@pytest.fixture
def clone(tmp_path: Path) -> Clone:
    """A clone on a machine with a GPU, its driver, a compiler, CUDA 13 and Python 3.12, all of them
    stand-ins."""
    made = make_clone(tmp_path)
    write_fake_python(Path(made.variables["PATH"].split(":")[0]) / "python3.12", "3.12.4")
    for name, text in (("nvidia-smi", SMI), ("g++", "#!/bin/sh\n")):
        tool(made, name, text)
    nvcc = tmp_path / "cuda" / "bin" / "nvcc"
    nvcc.parent.mkdir(parents=True)
    nvcc.write_text(NVCC)
    nvcc.chmod(0o755)
    (Path(made.variables["PATH"].split(":")[0]) / "nvcc").symlink_to(nvcc)
    made.variables |= {"FAKE_DRIVER": "580.65.06", "FAKE_CUDA": f"{cuda_of_torch()}.0", "FAKE_DOCTOR": "0"}
    (made.root / "megarl" / "cli.py").write_text(
        "import os, sys\nprint('asked', *sys.argv[1:])\nsys.exit(int(os.environ['FAKE_DOCTOR']))\n"
    )
    return made


def cuda_of_torch() -> int:
    [major] = [
        int(name.removeprefix("nvidia-nccl-cu")) for name in pins() if name.startswith("nvidia-nccl-cu")
    ]
    return major


def make(clone: Clone, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return clone.run("bash", "launch/gpu_environment.sh", *arguments, **variables)


TORCH = f"torch=={pins()['torch']} setuptools ninja packaging"
ENGINE = (
    f"--no-build-isolation transformer-engine-cu{cuda_of_torch()}=={pins()['transformer-engine']} "
    f"transformer-engine[pytorch]=={pins()['transformer-engine']}"
)
MEGARL = "--no-build-isolation --editable ROOT[{}]"


def test_torch_first_then_what_is_compiled_for_it_then_the_rest_then_the_doctor(clone: Clone) -> None:
    done = make(clone)
    assert done.returncode == 0, done.stderr
    assert clone.installed() == [TORCH, ENGINE, MEGARL.format("plot,vllm")]
    assert all(f"{clone.root}/constraints-gpu.txt" in words for words in clone.calls() if "install" in words)
    assert done.stdout == "asked doctor --transformer-engine\n"
    assert [step for step in range(1, 6) if f"[{step}/5]" in done.stderr] == [1, 2, 3, 4, 5]
    assert (clone.root / ".venv-gpu").is_dir() and not (clone.root / ".venv").exists()


@slow
def test_a_second_start_asks_the_doctor_alone(clone: Clone) -> None:
    make(clone)
    before = clone.calls()
    again = make(clone)
    assert (again.returncode, again.stdout) == (0, "asked doctor --transformer-engine\n"), again.stderr
    assert clone.calls() == before
    with (clone.root / "constraints-gpu.txt").open("a") as file:
        file.write("# another line\n")
    assert make(clone).returncode == 0
    assert len(clone.calls()) == 2 * len(before)


@slow
def test_an_environment_that_the_doctor_refuses_is_no_success(clone: Clone) -> None:
    for _ in range(2):
        refused = make(clone, FAKE_DOCTOR="1")
        assert refused.returncode == 1 and "does not work here; see what failed" in refused.stderr
    assert make(clone).returncode == 0


@slow
def test_a_failed_step_says_why_and_the_next_start_goes_on(clone: Clone) -> None:
    failed = make(clone, FAKE_PIP_FAILS=ENGINE.split()[-1])
    assert failed.returncode == 1 and "no matching distribution, says the stand-in" in failed.stderr
    assert str(clone.root / ".venv-gpu" / "install.log") in failed.stderr and "asked" not in failed.stdout
    assert make(clone).returncode == 0
    assert clone.installed()[-3:] == [TORCH, ENGINE, MEGARL.format("plot,vllm")]


@slow
@pytest.mark.parametrize(
    ("left_out", "installed"),
    [
        (["te"], [TORCH, MEGARL.format("plot,vllm")]),
        (["vllm"], [TORCH, ENGINE, MEGARL.format("plot")]),
        (["te", "vllm"], [TORCH, MEGARL.format("plot")]),
    ],
)
def test_parts_can_be_left_out(clone: Clone, left_out: list[str], installed: list[str]) -> None:
    done = make(clone, *(word for name in left_out for word in ("--without", name)))
    assert done.returncode == 0, done.stderr
    assert clone.installed() == installed
    assert done.stdout == ("asked doctor\n" if "te" in left_out else "asked doctor --transformer-engine\n")
    # what was left out is installed by a start that does not leave it out
    make(clone)
    assert clone.installed()[-1] == MEGARL.format("plot,vllm")


@sampled(1)
@pytest.mark.parametrize(
    ("variables", "removed", "says"),
    [
        ({"FAKE_DRIVER": "570.1"}, "", "the NVIDIA driver is 570.1, CUDA 13 wants 580 or newer"),
        ({}, "nvidia-smi", "no NVIDIA driver answers"),
        ({"FAKE_CUDA": "12.8"}, "", "cuda is of version 12, torch is built for 13"),
        ({}, "nvcc", "no nvcc"),
        ({"MEGARL_PYTHON": "python3.11"}, "", "python3.11 is 3.11.9: constraints-gpu.txt is for Python 3.12"),
        ({"MEGARL_PYTHON": "python3.13"}, "", "python3.13 is no Python that has venv"),
    ],
)
def test_what_is_missing_is_told_before_anything_is_installed(
    clone: Clone, variables: dict[str, str], removed: str, says: str
) -> None:
    if removed:
        (Path(clone.variables["PATH"].split(":")[0]) / removed).unlink()
        variables = {
            **variables,
            "CUDA_HOME": str(clone.root),
        }  # where there is none, whatever this machine has
    refused = make(clone, **variables)
    assert refused.returncode == 1 and says in refused.stderr and "Fix: " in refused.stderr
    assert clone.calls() == [] and not (clone.root / ".venv-gpu").exists()


@slow
def test_a_machine_without_a_gpu_may_make_it_for_others(clone: Clone) -> None:
    (Path(clone.variables["PATH"].split(":")[0]) / "nvidia-smi").unlink()
    assert make(clone, "--no-driver").returncode == 0


def test_a_dry_run_shows_the_steps_and_what_is_missing_and_changes_nothing(clone: Clone) -> None:
    done = make(clone, "--dry-run", FAKE_DRIVER="535.1")
    assert done.returncode == 0, done.stderr
    steps = re.findall(r"^(\d)\. ", done.stdout, re.MULTILINE)
    assert steps == ["1", "2", "3", "4", "5"]
    assert (
        "python3.12 -m venv" in done.stdout
        and "--no-build-isolation" in done.stdout
        and "megarl.cli doctor" in done.stdout
    )
    assert "missing for it here:" in done.stdout and "CUDA 13 wants 580 or newer" in done.stdout
    assert clone.calls() == [] and not (clone.root / ".venv-gpu").exists()
    assert "missing" not in make(clone, "--dry-run").stdout
    old = make(clone, "--dry-run", MEGARL_PYTHON="python3.11")
    assert (
        old.returncode == 0 and "python3.11 is 3.11.9: constraints-gpu.txt is for Python 3.12" in old.stdout
    )


@sampled(1)
@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--without"], "te or vllm is wanted"),
        (["--without", "torch"], "wanted"),
        (["-x"], "-x is not known"),
    ],
)
def test_arguments_that_are_not_known(clone: Clone, arguments: list[str], says: str) -> None:
    refused = make(clone, *arguments)
    assert refused.returncode == 1 and says in refused.stderr and clone.calls() == []


def project() -> dict[str, list[str]]:
    table = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return {"": table["dependencies"], **table["optional-dependencies"]}


@pytest.mark.parametrize("extra", ["", "plot", "te", "vllm", "wandb", "tensorboard"])
def test_every_requirement_has_a_version_within_its_bounds(extra: str) -> None:
    for requirement in map(Requirement, project()[extra]):
        version = pins().get(canonicalize_name(requirement.name))
        assert version is not None, f"{requirement.name} has no version in constraints-gpu.txt"
        assert requirement.specifier.contains(version), f"{requirement} does not allow {version}"


def test_the_versions_that_are_tested_on_a_cpu_are_those_for_gpus() -> None:
    """Where both have a package: what is tested is what runs. The newest megatron-core wants Python 3.12,
    vLLM on GPUs another ffi."""
    tested = dict(
        line.split("==")
        for line in (ROOT / "constraints-cpu.txt").read_text().splitlines()
        if "==" in line and line[0] != "#"
    )
    both = {
        canonicalize_name(name): Version(version)
        for name, version in tested.items()
        if canonicalize_name(name) in pins()
    }
    assert {name for name, version in both.items() if pins()[name] != version} <= {
        "megatron-core",
        "apache-tvm-ffi",
    }
    newest = re.search(r"^NEWEST_MEGATRON=(\S+)$", (ROOT / "launch" / "test.sh").read_text(), re.MULTILINE)
    assert newest is not None and pins()["megatron-core"] == Version(newest[1])


def test_the_image_is_for_the_cuda_of_torch_and_made_by_the_script() -> None:
    text = (ROOT / "launch" / "Dockerfile").read_text()
    cuda = re.search(r"^ARG CUDA=(\d+)\.(\d+)\.\d+$", text, re.MULTILINE)
    runtime = pins()["nvidia-cuda-runtime"]
    assert (
        cuda is not None
        and (int(cuda[1]), int(cuda[2])) == (runtime.major, runtime.minor)
        and runtime.major == cuda_of_torch()
    )
    assert "RUN bash launch/gpu_environment.sh --no-driver" in text
    copied = {word for line in re.findall(r"^COPY (.*)$", text, re.MULTILINE) for word in line.split()[:-1]}
    assert copied == {
        line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")
    }
    assert all((ROOT / name).exists() for name in copied)
    assert re.findall(r"python(\d\.\d+)-venv", text) == ["3.12"]
