"""A local Ray that does not come up: once more, then an error that says so, and never a wait without an end."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from typing import Any

import pytest
import ray

from megarl.distributed import ray_runtime
from megarl.errors import ClusterError


@pytest.fixture
def no_ray(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    yield
    local = ray_runtime._Local.present
    ray_runtime._end_local()
    if local is not None:
        # a start that failed leaves its logs
        shutil.rmtree(local.private, ignore_errors=True)


@pytest.mark.usefixtures("no_ray")
def test_what_ray_raises_is_told_after_one_more_try(monkeypatch: pytest.MonkeyPatch) -> None:
    tries = []

    def fail(**options: Any) -> None:
        tries.append(options["num_cpus"])
        raise Exception("The current node timed out during startup")

    monkeypatch.setattr(ray, "init", fail)
    with pytest.raises(ClusterError, match=r"a local Ray with 3 slots did not start \(The current node timed out during startup\)"):
        ray_runtime.init_ray(num_cpus=3)
    assert tries == [3, 3]


@pytest.mark.usefixtures("no_ray")
def test_a_second_try_that_goes_well_is_all(monkeypatch: pytest.MonkeyPatch) -> None:
    tries = []

    def fail_once(**options: Any) -> None:
        tries.append(options)
        if len(tries) == 1:
            raise Exception("slow machine")

    monkeypatch.setattr(ray, "init", fail_once)
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "127.0.0.1")
    ray_runtime.init_ray(num_cpus=3)
    assert len(tries) == 2


@pytest.mark.usefixtures("no_ray")
def test_a_start_that_hangs_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_runtime, "INIT_SECONDS", 0.05)
    monkeypatch.setattr(ray, "init", lambda **_: time.sleep(600))
    for address in (None, "127.0.0.1:1"):
        if address is not None:
            monkeypatch.setenv("RAY_ADDRESS", address)
        with pytest.raises(ClusterError, match=r"ray\.init did not come back within 0\.05 s"):
            ray_runtime.init_ray(num_cpus=3)
