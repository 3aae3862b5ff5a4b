"""What a run needs of a machine is checked before anything is created, and everything is named in one
list."""

from __future__ import annotations

import os
import resource
import socket
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from megarl.cli import load_and_check, main
from megarl.config import plugins
from megarl.config.nested import put
from megarl.config.recipes import recipes
from megarl.config.validate import validate_config
from megarl.doctor import versions
from megarl.errors import DataError, MachineError
from megarl.run import preflight
from megarl.run.loop import Schedule
from megarl.run.preflight import findings, print_findings, require_this_machine
from megarl.run.run import _generates, run
from tests.unit.driver_runs import make_config

CONFIG = Mapping[str, Any]


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RAY_ADDRESS", "MEGARL_DEVICE", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(preflight.nvml, "count_devices", lambda: 0)


@pytest.fixture
def config(tmp_path: Path, model: str, data: str) -> dict[str, Any]:
    return validate_config(make_config("grpo", tmp_path / "a" / "b", model, data))


def unreachable(*_: Any, **__: Any) -> None:
    raise OSError("no route to host")


def keys(config: CONFIG) -> list[str]:
    return [finding.key for finding in findings(config)]


def test_a_machine_that_has_everything(config: dict[str, Any]) -> None:
    assert findings(config) == []
    require_this_machine(config)


@pytest.mark.parametrize("recipe", [recipe.name for recipe in recipes()])
def test_every_recipe_is_refused_in_one_list_and_leaves_nothing(
    recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """None of them runs on a machine without a GPU or a network; the dry run has the same list as a
    warning."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.get_hf_file_metadata", unreachable)
    # what is free changes from one look to the next
    usage = preflight.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(preflight.shutil, "disk_usage", lambda _: usage)
    assert main(["train", recipe]) == 2
    refused = capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
    lines = [line for line in refused.splitlines() if line.startswith("  ")]
    assert (
        lines
        and "on this machine, where nothing was started:" in refused
        and all(". Fix: " in line for line in lines)
    )
    needs_gpu = load_and_check(recipe, [])["cluster"]["device"] == "cuda"
    assert any("cluster.device" in line for line in lines) is needs_gpu
    console = Console(width=100, record=True)
    print_findings(findings(load_and_check(recipe, [])), console)
    assert console.export_text().partition(":\n")[2].split() == refused.partition(":\n")[2].split()


def test_a_ledger_that_is_to_be_repeated_is_there(config: dict[str, Any], tmp_path: Path) -> None:
    run_dir = tmp_path / "earlier"
    repeating = put(config, "grpo.async_grpo", {"enabled": True, "replay": str(run_dir)})
    assert [str(finding) for finding in findings(repeating)] == [
        f"grpo.async_grpo.replay = {str(run_dir)!r}: there is no ledger/ in it. Fix: give the directory of a "
        "run that has trained with schedule=ready_first"
    ]
    (run_dir / "ledger").mkdir(parents=True)
    assert findings(repeating) == []
    # and is asked instead of engines, which a validation needs
    assert _generates(config, Schedule(8)) and not _generates(repeating, Schedule(8))  # type: ignore[arg-type]
    assert _generates(repeating, Schedule(8, val_at_end=True))  # type: ignore[arg-type]


def test_data_are_not_read_for_a_model_that_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.get_hf_file_metadata", unreachable)
    monkeypatch.setattr("megarl.run.inputs.describe_inputs", lambda _: pytest.fail("the data were read"))
    assert main(["train", "grpo-qwen2.5-1.5b-1gpu-megatron", "--dry-run", "--data"]) == 2
    assert "policy.model_name = 'Qwen/Qwen2.5-1.5B': it is not on this disk" in capsys.readouterr().err


def test_packages_devices_directories_and_models_are_named_together(
    config: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight.env, "installed_version", lambda _: None)
    monkeypatch.setattr(preflight.importlib.util, "find_spec", lambda _: None)
    monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{closed_port()}")
    monkeypatch.setattr("huggingface_hub.get_hf_file_metadata", unreachable)
    (tmp_path / "file").write_text("")
    changed = {
        "logger.wandb_enabled": True,
        "logger.tensorboard_enabled": True,
        "policy.megatron_cfg.transformer_engine": True,
        "policy.megatron_cfg.moe_permute_fusion": True,
        "policy.megatron_cfg.moe_token_dispatcher_type": "flex",
        "run_dir": str(tmp_path / "file" / "run"),
        "checkpointing.checkpoint_dir": str(tmp_path / "a"),
        "checkpointing.signing_key_file": str(tmp_path / "none"),
        "policy.model_name": "nobody/has-this",
        "env.reward": f"{tmp_path}/none.py:score",
        "data.validation.path": str(tmp_path / "none.jsonl"),
    }
    for key, value in changed.items():
        config = put(config, key, value)
    assert sorted(keys(config)) == sorted(
        [
            "policy.megatron_cfg.transformer_engine",
            "policy.megatron_cfg.moe_permute_fusion",
            "policy.megatron_cfg.moe_token_dispatcher_type",
            "logger.wandb_enabled",
            "logger.tensorboard_enabled",
            "RAY_ADDRESS",
            "policy.model_name",
            "env.reward",
            "data.validation.path",
            "run_dir",
            "checkpointing.signing_key_file",
        ]
    )
    # an evaluation writes no checkpoints and logs to nobody
    assert "run_dir" not in [finding.key for finding in findings(config, trains=False)]


@pytest.mark.parametrize(
    ("is_clone", "installation"),
    [(True, "bash launch/gpu_environment.sh"), (False, "pip install 'megarl-trainer[vllm]'")],
)
def test_an_engine_that_is_not_installed_has_one_fix(
    is_clone: bool, installation: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The dry run and the doctor name the same command."""
    if not is_clone:
        monkeypatch.setattr(preflight.env, "__file__", str(tmp_path / "megarl" / "env.py"))
    for module in (preflight.env, plugins, versions):
        monkeypatch.setattr(module, "installed_version", lambda _: None)
    lacking = {
        finding.key: finding.fix
        for finding in findings(load_and_check("grpo-qwen2.5-1.5b-1gpu-24gb-megatron", []))
    }
    fix = lacking["policy.generation.backend"]
    assert fix.startswith(f"{installation} (on a machine without a GPU: ")
    assert fix.endswith("; or add '~policy.generation.backend': then the policy itself generates")
    assert versions._optional("vLLM", ["vllm"], "vllm", "").fix.startswith(f"{installation}   (")


@pytest.mark.parametrize(("version", "is_there"), [("0.16.1", False), ("0.19.1", False), ("0.19.2", True)])
def test_a_model_class_that_megatron_core_lacks_is_named(
    version: str, is_there: bool, config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight.env, "installed_version", lambda _: version)
    key = "policy.megatron_cfg.model_class"
    said = [str(finding) for finding in findings(put(config, key, "hybrid")) if finding.key == key]
    fix = "write gpt or null, or install megatron-core 0.19.2 or newer, for Python 3.12"
    assert said == (
        [] if is_there else [f"{key} = 'hybrid': Megatron-Core {version} has no HybridModel. Fix: {fix}"]
    )
    assert not [finding for finding in findings(config) if finding.key == key]


def closed_port() -> int:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        return int(closed.getsockname()[1])


@pytest.mark.parametrize(
    ("device", "present", "visible", "ranks", "said"),
    [
        ("cuda", 0, None, 2, "needs 2 GPUs, and this machine shows 0"),
        ("cuda", 8, "0", 2, "needs 2 GPUs, and this machine shows 1"),
        ("cuda", 8, "-1", 1, "shows 0"),
        ("auto", 1, None, 2, "needs 2 GPUs, and this machine shows 1"),
        ("cuda", 0, None, 1, "needs 1 GPU, and this machine shows 0"),
        ("cuda", 2, None, 2, ""),
        ("auto", 0, None, 2, ""),
        ("cpu", 1, None, 2, ""),
        ("cpu", 0, None, 10_000, "10000 workers"),
    ],
)
def test_devices(
    device: str,
    present: int,
    visible: str | None,
    ranks: int,
    said: str,
    config: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(preflight.nvml, "count_devices", lambda: present)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    config["cluster"] |= {"device": device, "gpus_per_node": ranks}
    found = list(preflight.absent_devices(config))
    assert [said in finding.bound for finding in found] == [True] * bool(said)
    # a cluster that runs has devices of its own
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert list(preflight.absent_devices(config)) == []


def test_a_disk_without_room_for_the_checkpoints(
    config: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = preflight.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(preflight.shutil, "disk_usage", lambda _: usage._replace(free=1 << 20))
    # both are on one disk, of which one finding is enough
    assert keys(config) == ["checkpointing.checkpoint_dir"]
    [finding] = findings(config)
    absent = f"1.0 MiB are free in {tmp_path}, as it does not exist yet, and the run writes 64.0 MiB"
    assert absent in finding.bound and "keep_top_k" in finding.fix
    [finding] = findings(put(config, "checkpointing.enabled", False))
    assert finding.key == "run_dir" and "keep_top_k" not in finding.fix
    monkeypatch.setattr(preflight.shutil, "disk_usage", lambda _: usage._replace(total=0, free=0))
    assert findings(config) == []
    # exports of 1 GiB, and checkpoints of 4
    monkeypatch.setattr(
        preflight, "disk_bytes", lambda config, _: (5 if config["checkpointing"]["enabled"] else 1) << 30
    )
    monkeypatch.setattr(preflight.shutil, "disk_usage", lambda _: usage._replace(free=4 << 30))
    assert "writes 5.0 GiB" in findings(config)[0].bound
    written = Path(config["run_dir"]) / "checkpoints"
    written.mkdir(parents=True)
    with (written / "large").open("wb") as sparse:
        sparse.truncate(2 << 30)
    assert findings(config) == []


def test_each_directory_of_a_file_system_has_to_be_writable(
    config: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "others").mkdir()
    config["checkpointing"]["checkpoint_dir"] = str(tmp_path / "others" / "checkpoints")
    real = os.access
    monkeypatch.setattr(
        preflight.os, "access", lambda path, mode: path != tmp_path / "others" and real(path, mode)
    )
    assert keys(config) == ["checkpointing.checkpoint_dir"]
    assert "others cannot be written by user" in findings(config)[0].bound


def test_checkpoints_on_another_file_system_need_no_room_in_the_runs_directory(
    config: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as elsewhere:
        if os.stat(elsewhere).st_dev == tmp_path.stat().st_dev:
            pytest.skip("one file system holds both")
        config["checkpointing"]["checkpoint_dir"] = f"{elsewhere}/checkpoints"
        usage = preflight.shutil.disk_usage(tmp_path)
        monkeypatch.setattr(
            preflight, "disk_bytes", lambda config, _: (5 if config["checkpointing"]["enabled"] else 1) << 30
        )
        room = {tmp_path: 2 << 30, Path(elsewhere): 5 << 30}
        monkeypatch.setattr(preflight.shutil, "disk_usage", lambda place: usage._replace(free=room[place]))
        assert findings(config) == []
        room[Path(elsewhere)] = 3 << 30
        assert "writes 4.0 GiB" in findings(config)[0].bound and keys(config) == [
            "checkpointing.checkpoint_dir"
        ]


def test_a_directory_that_has_the_name_of_a_package_is_none(
    config: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """W&B makes one in the working directory, which may be on the path."""
    (tmp_path / "no_such_package").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    assert not preflight._can_be_imported("no_such_package") and preflight._can_be_imported("numpy")


def test_limits_of_this_process(config: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    limits = {
        resource.RLIMIT_NOFILE: (100, 100),
        resource.RLIMIT_NPROC: (resource.RLIM_INFINITY, resource.RLIM_INFINITY),
    }
    monkeypatch.setattr(preflight.resource, "getrlimit", limits.__getitem__)
    monkeypatch.setattr(
        preflight, "_limits_of_processes", lambda: iter([("ulimit -u", 400, 200), ("pids.max", 5000, 200)])
    )
    assert keys(config) == ["ulimit -n", "ulimit -u"]


def test_a_refused_start_leaves_nothing(tmp_path: Path, model: str) -> None:
    """Also where the data are at fault, which are read when the directory is locked."""
    (tmp_path / "empty.jsonl").write_text("")
    config = make_config("sft", tmp_path / "runs" / "mine", model, str(tmp_path / "empty.jsonl"))
    with pytest.raises(DataError):
        run(config, lambda *_: pytest.fail("no policy is made"))
    assert sorted(each.name for each in tmp_path.iterdir()) == ["empty.jsonl"]
    # what was there before stays as it was
    directory = tmp_path / "runs" / "mine"
    directory.mkdir(parents=True)
    for before in ([], ["run.lock"]):
        for name in before:
            (directory / name).touch()
        with pytest.raises(DataError):
            run(config, lambda *_: pytest.fail("no policy is made"))
        assert [each.name for each in directory.iterdir()] == before


def test_a_real_start_that_is_refused_starts_no_ray(
    config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megarl.run.run.start_ray", lambda *_: pytest.fail("Ray was started"))
    config["cluster"]["device"] = "cuda"
    with pytest.raises(
        MachineError,
        match=r"1 error on this machine, where nothing was started:\n  1\. cluster.device = 'cuda'",
    ):
        run(config)
    assert not Path(config["run_dir"]).parent.exists()


def test_a_name_server_that_never_answers_is_not_waited_for(
    config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    import threading

    done = threading.Event()
    monkeypatch.setattr(preflight, "_LOOK_S", 0.2)
    monkeypatch.setattr("huggingface_hub.get_hf_file_metadata", lambda *_, **__: done.wait())
    config["policy"]["model_name"] = "nobody/has-this"
    assert "the hub has not answered for 0.2 s" in findings(config)[0].bound
    # nor for each name in turn
    monkeypatch.setattr(preflight, "_LOOK_S", 1.0)
    config["policy"]["tokenizer"]["name"] = "nobody/has-that"
    begun = time.monotonic()
    found = [each.value for each in preflight.unreachable_models(config)]  # type: ignore[arg-type]
    assert found == ["nobody/has-this", "nobody/has-that"] and time.monotonic() - begun < 2.0
    done.set()
