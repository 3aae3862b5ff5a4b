"""Profiles: torch's trace as a browser reads it, the capture range of the CUDA profiler, what the environment
says."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megarl.config.load import with_environment
from megarl.distributed.device import DeviceRuntime
from megarl.distributed.worker_group_utils import get_nsight_config_if_pattern_matches
from megarl.errors import ConfigError, StateError
from megarl.models.engine.worker import StepTrace
from megarl.run.profiling import tell_worker_groups


def test_a_trace_holds_what_was_computed_between_start_and_stop(tmp_path: Path) -> None:
    torch.ones(3, 3).sort()
    trace = StepTrace(torch.device("cpu"))
    torch.ones(7, 5) @ torch.ones(5, 3)
    path = tmp_path / "profiles" / "steps_1_to_2_rank0.json"
    assert trace.stop(path) == str(path)
    torch.ones(3, 3).cumsum(0)
    events = json.loads(path.read_text())["traceEvents"]
    names = {event.get("name") for event in events}
    assert "aten::mm" in names and not names & {"aten::sort", "aten::cumsum"}
    assert all({"ph", "pid"} <= event.keys() for event in events), "the form that chrome://tracing reads"


def test_a_trace_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StateError, match=r"profile .* cannot be written"):
        StepTrace(torch.device("cpu")).stop(tmp_path / "file" / "trace.json")


def test_the_capture_range_opens_and_closes_on_a_gpu_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(
        torch.cuda,
        "profiler",
        SimpleNamespace(start=lambda: calls.append("start"), stop=lambda: calls.append("stop")),
    )
    for runtime in (
        DeviceRuntime(torch.device("cpu"), "gloo"),
        DeviceRuntime(torch.device("cuda", 0), "nccl"),
    ):
        runtime.profiler_start()
        runtime.profiler_stop()
    assert calls == ["start", "stop"]


def test_environment_fills_what_the_configuration_leaves_out(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MEGARL_NSYS_PROFILE_STEP_RANGE", "MEGARL_NSYS_WORKER_PATTERNS"):
        monkeypatch.delenv(name, raising=False)
    assert with_environment({"seed": 1}) == {"seed": 1}
    monkeypatch.setenv("MEGARL_NSYS_PROFILE_STEP_RANGE", "3:5")
    monkeypatch.setenv("MEGARL_NSYS_WORKER_PATTERNS", "*policy*")
    assert with_environment({"seed": 1}) == {
        "seed": 1,
        "profiler": {"steps": [3, 5], "nsys_workers": "*policy*"},
    }
    for wrong in ("3-5", "3", "3:5:7", "a:5", ":"):
        monkeypatch.setenv("MEGARL_NSYS_PROFILE_STEP_RANGE", wrong)
        with pytest.raises(ConfigError, match=r"MEGARL_NSYS_PROFILE_STEP_RANGE = .*write 3:5"):
            with_environment({})
    monkeypatch.setenv("MEGARL_NSYS_PROFILE_STEP_RANGE", "3:5")
    given = {"profiler": {"steps": [7, 8], "nsys_workers": None, "torch_ranks": [1]}}
    assert with_environment(given) == {
        "profiler": {"steps": [7, 8], "nsys_workers": "*policy*", "torch_ranks": [1]}
    }


def test_worker_groups_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MEGARL_NSYS_PROFILE_STEP_RANGE", "MEGARL_NSYS_WORKER_PATTERNS"):
        monkeypatch.setenv(name, "")
    tell_worker_groups({"steps": None, "nsys_workers": None, "torch_ranks": []})
    assert get_nsight_config_if_pattern_matches("lm_policy") == {}
    tell_worker_groups({"steps": [3, 5], "nsys_workers": "*policy*", "torch_ranks": []})
    assert get_nsight_config_if_pattern_matches("lm_policy")["nsight"]["o"] == "'lm_policy_3:5_%p'"
