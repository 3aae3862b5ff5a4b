"""The doctor: what is real here is really tried, and what is not here is judged from what a driver or kernel
would say."""

from __future__ import annotations

import json
import os
import resource
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest
from packaging.requirements import Requirement

from megarl.cli import main
from megarl.config import report
from megarl.doctor import command, network, storage, versions
from megarl.doctor.check import Check, Verdict
from megarl.doctor.command import exit_code
from megarl.doctor.devices import Driver, DriverFault, Gpu, TorchBuild, check_devices, judge, read_driver
from megarl.doctor.storage import check_durable_write, check_lock, check_storage, judge_space
from megarl.doctor.versions import check_system, judge_locked_memory, judge_open_files, judge_shared_memory
from tests.tiers import slow

GIB = 2**30
H100 = Gpu("NVIDIA H100 80GB HBM3", 80 * GIB, 0)


def verdicts(checks: list[Check]) -> dict[str, str]:
    return {check.name: check.verdict.value for check in checks}


def test_the_command_tries_everything_and_leaves_nothing(
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    # some clusters' Python greets on standard output
    site = tmp_path_factory.mktemp("site")
    (site / "sitecustomize.py").write_text("print('Welcome to the cluster', flush=True)\n")
    monkeypatch.setenv("PYTHONPATH", str(site), prepend=os.pathsep)
    code = main(["doctor", "--run-dir", str(tmp_path / "runs" / "new"), "--json"])
    told = json.loads(capsys.readouterr().out)
    found = {check["name"]: check for check in told["checks"]}
    assert {check["room"] for check in told["checks"]} == {
        "versions",
        "devices",
        "builds",
        "system",
        "network",
        "storage",
    }
    assert (
        found["gloo all-reduce"]["verdict"] == "ok"
        and "2 processes added 4 MiB" in found["gloo all-reduce"]["found"]
    )
    assert found["writing"]["verdict"] == found["locks"]["verdict"] == "ok"
    assert found["python"]["found"] == ".".join(map(str, sys.version_info[:3]))
    assert found["torch"]["verdict"] == "ok" and {"Transformer Engine", "vLLM", "Slurm"} <= set(found)
    assert code == (0 if told["ok"] else 1) and told["ok"] == all(
        check["verdict"] != "failed" for check in told["checks"]
    )
    assert all(check["fix"] for check in told["checks"] if check["verdict"] in ("failed", "warning"))
    assert list(tmp_path.iterdir()) == []


@slow
def test_a_rank_that_fails_is_named_with_its_last_words() -> None:
    check = network.check_all_reduce("no-such-backend", 2)
    # both fail, and either may be the first
    assert (
        check.verdict is Verdict.FAILED
        and check.found.startswith(("rank 0 of 2 ", "rank 1 of 2 "))
        and "no-such-backend" in check.found
        and "GLOO_SOCKET_IFNAME" in check.fix
    )


def test_a_hanging_all_reduce_ends_at_its_deadline() -> None:
    check = network.check_all_reduce("gloo", 2, deadline_s=0.0)
    assert check.verdict is Verdict.FAILED and "not finished within 0 s" in check.found


@pytest.mark.parametrize(
    ("requirement", "verdict", "says"),
    [
        (Requirement("torch>=2.9"), "ok", ""),
        (Requirement("torch>=99"), "failed", ">=99 is required"),
        (Requirement("no-such-package-of-anybody>=1"), "failed", "not installed"),
    ],
    ids=str,
)
def test_packages_are_held_against_their_bounds(requirement: Requirement, verdict: str, says: str) -> None:
    check = versions.check_package(requirement)
    assert check.verdict.value == verdict and says in check.found
    assert check.fix == (
        ""
        if verdict == "ok"
        else f"pip install -c constraints-cpu.txt '{requirement.name}{requirement.specifier}'"
    )


@pytest.mark.parametrize(("version", "is_told"), [("0.16.1", False), ("0.19.0rc1", False), ("0.19.2", True)])
def test_a_deprecated_model_is_told_of(version: str, is_told: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "installed_version", lambda name: version)
    check = versions.check_package(Requirement("megatron-core"))
    assert check.verdict is Verdict.OK and ("GPTModel" in check.found) is is_told


def test_slurm_is_asked_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert versions.check_slurm().verdict is Verdict.ABSENT
    program = tmp_path / "sbatch"
    program.write_text("#!/bin/sh\necho slurm-wlm 22.05.8\n")
    program.chmod(0o755)
    assert versions.check_slurm() == Check("versions", "Slurm", Verdict.OK, "slurm-wlm 22.05.8")
    program.write_text("#!/bin/sh\necho cannot read slurm.conf >&2\nexit 1\n")
    check = versions.check_slurm()
    assert check.verdict is Verdict.WARNING and "cannot read slurm.conf" in check.found
    program.write_text("#!/bin/sh\nexec /bin/sleep 60\n")
    check = versions.check_slurm(timeout_s=0.0)
    assert check.verdict is Verdict.WARNING and "timed out" in check.found
    program.write_text("no program\0")
    assert versions.check_slurm().verdict is Verdict.WARNING


@pytest.mark.parametrize(
    ("driver", "torch", "expected"),
    [
        (None, TorchBuild(None, 0), {"GPU": "absent"}),
        (
            Driver("570.1", 12080, (H100,)),
            TorchBuild("12.8", 1),
            {"NVIDIA driver": "ok", "GPU 0": "ok", "CUDA": "ok"},
        ),
        (
            Driver("570.1", 12080, (H100,)),
            TorchBuild(None, 0),
            {"NVIDIA driver": "ok", "GPU 0": "ok", "CUDA": "failed"},
        ),
        (
            Driver("535.1", 12020, (H100,)),
            TorchBuild("13.0", 0),
            {"NVIDIA driver": "ok", "GPU 0": "ok", "CUDA": "failed"},
        ),
        (
            Driver("570.1", 12080, (H100, H100)),
            TorchBuild("12.8", 1),
            {"NVIDIA driver": "ok", "GPU 0": "ok", "GPU 1": "ok", "CUDA": "warning"},
        ),
        (
            Driver("570.1", 12080, (Gpu("H100", 80 * GIB, 30 * GIB),)),
            TorchBuild("12.8", 1),
            {"NVIDIA driver": "ok", "GPU 0": "warning", "CUDA": "ok"},
        ),
    ],
    ids=["no driver", "well", "torch for CPUs", "old driver", "one hidden", "in use"],
)
def test_devices(driver: Driver | None, torch: TorchBuild, expected: dict[str, str]) -> None:
    checks = list(judge(driver, torch))
    assert verdicts(checks) == expected
    assert all(check.fix for check in checks if check.verdict in (Verdict.FAILED, Verdict.WARNING))


@pytest.mark.parametrize(
    ("driver", "torch", "expected"),
    [
        (DriverFault("Driver/library version mismatch"), TorchBuild("12.8", 0), {"NVIDIA driver": "failed"}),
        (Driver("570.1", 12080, ()), TorchBuild("13.0", 0), {"NVIDIA driver": "ok", "GPU": "absent"}),
        (
            Driver("570.1", 12080, (Gpu("GB10", 0, 0),)),
            TorchBuild("12.8", 1),
            {"NVIDIA driver": "ok", "GPU 0": "ok", "CUDA": "ok"},
        ),
        (
            Driver("570.1", 12080, (H100, Gpu("", 0, 0, "GPU is lost"))),
            TorchBuild("12.8", 1),
            {"NVIDIA driver": "ok", "GPU 0": "ok", "GPU 1": "warning", "CUDA": "warning"},
        ),
    ],
    ids=["mismatch", "no GPU", "memory of the host", "one lost"],
)
def test_drivers_and_devices_that_do_not_answer(
    driver: Driver | DriverFault, torch: TorchBuild, expected: dict[str, str]
) -> None:
    checks = list(judge(driver, torch))
    assert verdicts(checks) == expected
    assert all(check.fix for check in checks if check.verdict in (Verdict.FAILED, Verdict.WARNING))
    faults = (
        [driver.text] if isinstance(driver, DriverFault) else [gpu.fault for gpu in driver.gpus if gpu.fault]
    )
    assert all(any(fault in check.found for check in checks) for fault in faults)


def test_only_a_driver_that_is_not_there_counts_as_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def initialise(error: type[Exception]) -> None:
        def refuse() -> None:
            raise error()

        monkeypatch.setattr(pynvml, "nvmlInit", refuse)

    for absent in (pynvml.NVMLError_LibraryNotFound, pynvml.NVMLError_DriverNotLoaded):
        initialise(absent)
        assert read_driver() is None
    initialise(pynvml.NVMLError_LibRmVersionMismatch)
    assert read_driver() == DriverFault("RM has detected an NVML/RM version mismatch.")


def test_a_gpu_that_fell_off_the_bus_hides_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    def handle(index: int) -> int:
        if index == 1:
            raise pynvml.NVMLError_GpuIsLost()
        return index

    def memory(handle: int) -> Any:
        if handle == 2:
            raise pynvml.NVMLError_NotSupported()
        return SimpleNamespace(total=80 * GIB, used=GIB)

    replies: dict[str, Callable[..., Any]] = {
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlDeviceGetCount": lambda: 3,
        "nvmlSystemGetDriverVersion": lambda: "570.1",
        "nvmlSystemGetCudaDriverVersion_v2": lambda: 12080,
        "nvmlDeviceGetName": lambda handle: f"GPU of slot {handle}",
        "nvmlDeviceGetHandleByIndex": handle,
        "nvmlDeviceGetMemoryInfo": memory,
    }
    for name, reply in replies.items():
        monkeypatch.setattr(pynvml, name, reply)
    driver = read_driver()
    assert isinstance(driver, Driver)
    assert driver.gpus == (
        Gpu("GPU of slot 0", 80 * GIB, GIB),
        Gpu("", 0, 0, "GPU is lost"),
        Gpu("GPU of slot 2", 0, 0),
    )


@pytest.mark.parametrize(
    ("kernels", "capability", "served"),
    [
        (("sm_80", "sm_90"), (9, 0), True),
        (("sm_80",), (8, 9), True),
        (("sm_80",), (9, 0), False),
        (("sm_80", "compute_80"), (9, 0), True),
        (("sm_75", "sm_80", "sm_90", "sm_100", "sm_120", "compute_120"), (7, 0), False),
        (("sm_90a",), (9, 0), True),
        (("sm_100a",), (10, 3), False),
        (("sm_100f",), (10, 3), True),
        (("compute_100f",), (12, 0), False),
        (("sm_100f", "sm_120"), (12, 1), True),
        ((), (7, 0), True),
        (("sm_90",), (0, 0), True),
    ],
    ids=str,
)
def test_kernels_of_torch_serve_a_gpu(
    kernels: tuple[str, ...], capability: tuple[int, int], served: bool
) -> None:
    gpu = Gpu("a GPU", 80 * GIB, 0, capability=capability)
    check = list(judge(Driver("580.1", 13000, (gpu,)), TorchBuild("13.0", 1, kernels)))[-1]
    assert check.name == "CUDA" and (check.verdict is Verdict.OK) is served
    assert served or (
        f"compute capability {capability[0]}.{capability[1]}" in check.found and kernels[0] in check.found
    )


def test_a_driver_that_is_too_old_is_told_which_one_is_wanted() -> None:
    check = list(judge(Driver("570.1", 12080, (H100,)), TorchBuild("13.0", 0)))[-1]
    assert (
        check.verdict is Verdict.FAILED
        and "supports at most 12.8" in check.found
        and "580 or newer" in check.fix
    )


@pytest.mark.parametrize("package", ["torch", "pynvml"])
def test_devices_without_a_package_name_it(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    (check,) = check_devices()
    assert check.verdict is Verdict.FAILED and package in check.found and "pip install" in check.fix


def test_the_driver_agrees_with_torch() -> None:
    import torch

    driver = read_driver()
    assert not isinstance(driver, Driver) or len(driver.gpus) >= torch.cuda.device_count()
    assert isinstance(driver, Driver) or not torch.cuda.is_available()


def test_limits_of_the_system() -> None:
    assert {check.name for check in check_system()} == {
        "processors",
        "memory",
        "/dev/shm",
        "open files",
        "locked memory",
    }
    assert judge_shared_memory(2 * GIB, 2 * GIB).verdict is Verdict.OK
    full = judge_shared_memory(8 * GIB, GIB)
    assert (
        full.verdict is Verdict.WARNING
        and "1.00 of 8.00 GiB free" in full.found
        and "ls -lt /dev/shm" in full.fix
    )
    small = judge_shared_memory(64 * 2**20, 64 * 2**20)
    assert small.verdict is Verdict.WARNING and "0.06 GiB" in small.found and "--shm-size" in small.fix
    infinite = resource.RLIM_INFINITY
    assert judge_open_files(infinite, infinite).verdict is judge_open_files(4096, 4096).verdict is Verdict.OK
    assert judge_open_files(1024, infinite).fix == judge_open_files(1024, 1_000_000).fix == "ulimit -n 65536"
    assert "limits.conf" in judge_open_files(1024, 2048).fix


def test_locked_memory_counts_where_there_is_infiniband() -> None:
    infinite, little = resource.RLIM_INFINITY, 8 * 2**20
    assert judge_locked_memory(little, []).found == "8 MiB; no InfiniBand here"
    assert (
        judge_locked_memory(infinite, ["mlx5_0"]).verdict
        is judge_locked_memory(64 * GIB, ["mlx5_0"]).verdict
        is Verdict.OK
    )
    check = judge_locked_memory(little, ["mlx5_0", "mlx5_1"])
    assert (
        check.verdict is Verdict.WARNING and "8 MiB, NCCL over mlx5_0, mlx5_1 needs no limit" in check.found
    )
    assert "ulimit -l unlimited" in check.fix and "PropagateResourceLimitsExcept" in check.fix


def test_a_directory_that_cannot_be_written_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "mkdir", refuse)  # root may write anywhere
    checks = list(check_storage(tmp_path))
    assert (
        checks[-1].verdict is Verdict.FAILED
        and f"{tmp_path}: Permission denied" in checks[-1].found
        and str(tmp_path) in checks[-1].fix
    )


def test_a_place_where_no_directory_can_be_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "circle").symlink_to("circle")
    monkeypatch.delenv("HOME")
    nobody = "~nobody-of-this-name/runs"
    for place in (tmp_path / "file", tmp_path / "file" / "run", tmp_path / "circle", Path(nobody)):
        *others, check = check_storage(place)
        assert others == [] and check.verdict is Verdict.FAILED and str(place) in check.found and check.fix, (
            place
        )


def test_a_link_is_judged_by_what_it_leads_to(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("/proc/self")
    checks = {check.name: check for check in check_storage(tmp_path / "link")}
    assert "on proc," in checks["file system"].found and checks["writing"].verdict is Verdict.FAILED


def test_what_is_mounted_over_an_automounter_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    mounts = [
        SimpleNamespace(mountpoint=point, fstype=kind)
        for point, kind in (("/", "ext4"), ("/home", "autofs"), ("/home", "nfs4"))
    ]
    monkeypatch.setattr(storage.psutil, "disk_partitions", lambda all: mounts)
    assert "/home/me on nfs4, shared between hosts" in storage.check_file_system(Path("/home/me")).found
    assert "on ext4, only on this host" in storage.check_file_system(Path("/data")).found


def test_bytes_that_another_process_sees_otherwise_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert check_durable_write(tmp_path).verdict is Verdict.OK
    assert check_lock(tmp_path).verdict is Verdict.OK
    monkeypatch.setattr(storage, "_READER", "import sys; sys.stdout.write('0' * 64)")
    assert check_durable_write(tmp_path).verdict is Verdict.FAILED


def test_room_for_checkpoints() -> None:
    assert (
        judge_space(140 * GIB).found
        == f"140.0 GiB free: one checkpoint of {140 * GIB / 14e9:.1f} billion parameters"
    )
    assert judge_space(4 * GIB).verdict is Verdict.WARNING


def test_only_what_failed_makes_the_exit_code() -> None:
    one = {verdict: Check("system", "x", verdict, "found", "do this") for verdict in Verdict}
    assert exit_code([one[Verdict.OK], one[Verdict.ABSENT], one[Verdict.WARNING]]) == 0
    assert exit_code(list(one.values())) == 1


@pytest.mark.parametrize("width", [80, 120])
def test_what_was_found_is_folded_and_commands_are_not(
    width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    long = Check("system", "a thing", Verdict.FAILED, "found " * 40, "command " * 40)
    monkeypatch.setattr(command, "examine", lambda *asked: iter([long]))
    monkeypatch.setattr(report, "WIDTH", width)
    assert command.run() == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if len(line) > width] == ["           fix: " + "command " * 40]
    assert lines[1].startswith("  failed   a thing             found") and lines[2].startswith(
        " " * 31 + "found"
    )
