"""A local Ray that does not come up: once more, then an error that says so, and never a wait without an
end."""

from __future__ import annotations

import importlib
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest
import ray
from ray._private import worker as ray_worker

from megarl import env, redaction
from megarl.distributed import ray_runtime
from megarl.errors import ClusterError, DeadlineError


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
    with pytest.raises(
        DeadlineError,
        match=r"a local Ray with 3 slots did not start \(The current node timed out during startup\)",
    ):
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
@pytest.mark.parametrize("said", [None, "disabled", "token"])
def test_a_local_ray_asks_for_a_token_whatever_is_the_default_or_said(
    said: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of some versions of Ray the default is to ask for none."""
    seen: list[tuple[str | None, Any, bool]] = []
    own: Any = importlib.import_module("ray._raylet")

    def begin(**options: Any) -> None:
        seen.append(
            (
                env.text("RAY_AUTH_MODE"),
                own.get_authentication_mode(),
                len(env.text("RAY_AUTH_TOKEN", "") or "") == 64,
            )
        )

    for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RAY_AUTH_MODE", said or "disabled")
    own.Config.initialize("")
    if said is None:
        monkeypatch.delenv("RAY_AUTH_MODE")
    monkeypatch.setattr(ray, "init", begin)
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "127.0.0.1")
    ray_runtime.init_ray(num_cpus=3)
    assert seen == [("token", own.AuthenticationMode.TOKEN, True)]


@pytest.mark.usefixtures("no_ray")
@pytest.mark.parametrize(("try_s", "timeout_s", "tries"), [(0.05, 600.0, 2), (120.0, 0.05, 1)])
def test_a_start_that_hangs_has_an_end(
    try_s: float, timeout_s: float, tries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And an exit code that says that another start may succeed. All tries together have
    ``deadlines.init_s``."""
    begun = []

    def hang(**options: Any) -> None:
        begun.append(options)
        time.sleep(600)

    monkeypatch.setattr(ray_runtime, "INIT_SECONDS", try_s)
    monkeypatch.setattr(ray, "init", hang)
    for address in (None, "127.0.0.1:1"):
        begun.clear()
        if address is not None:
            monkeypatch.setenv("RAY_ADDRESS", address)
        with pytest.raises(DeadlineError, match=r"ray\.init did not return within 0\.05") as caught:
            ray_runtime.init_ray(num_cpus=3, timeout_s=timeout_s)
        assert caught.value.exit_code == 4 and len(begun) == (tries if address is None else 1)


@pytest.mark.usefixtures("no_ray")
@pytest.mark.parametrize("address", [None, "127.0.0.1:1"])
def test_a_start_that_something_is_wrong_with_is_no_hang(
    address: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(**options: Any) -> None:
        raise ConnectionError("nothing listens there")

    monkeypatch.setattr(ray, "init", refuse)
    if address is not None:
        monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(ClusterError, match="nothing listens there") as caught:
        ray_runtime.init_ray(num_cpus=3)
    assert caught.value.exit_code == 1


def test_what_ray_shows_of_workers_has_no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their lines, those of libraries that have a log of their own among them, come to the driver by Ray."""
    shown: list[tuple[dict[str, Any], bool]] = []

    def show(data: dict[str, Any], ignore_prefix: bool) -> None:
        shown.append((data, ignore_prefix))

    monkeypatch.setattr(ray_worker, "print_to_stdstream", show)
    monkeypatch.setattr(redaction, "_learned", {"planted-secret"})
    for _ in range(2):
        ray_runtime._redact_what_workers_print()
    ray_worker.print_to_stdstream(
        {"lines": ["HF_TOKEN=abc", "plain", "is planted-secret"], "pid": 7, "is_err": True},
        ignore_prefix=False,
    )
    assert shown == [({"lines": ["HF_TOKEN=***", "plain", "is ***"], "pid": 7, "is_err": True}, False)]


WORKER = """
import logging, warnings
from megarl.distributed.worker_shell import WorkerShell
WorkerShell("worker", {"MEGARL_DB_PASS": "planted-secret", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "1"})
try:
    raise ValueError("with planted-secret")
except ValueError:
    logging.getLogger("megarl.anything").exception("at https://me:word@host")
logging.getLogger("other").info("not shown")
import os
print("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD" in os.environ)
"""


def test_a_worker_logs_no_secrets_and_keeps_no_variable_by_which_files_could_run_code() -> None:
    done = subprocess.run([sys.executable, "-c", WORKER], capture_output=True, text=True, check=True)
    assert (
        "ERROR megarl.anything: at https://***@host\n" in done.stderr
        and "ValueError: with ***\n" in done.stderr
    )
    assert "planted-secret" not in done.stderr and "not shown" not in done.stderr
    assert done.stdout == "False\n"
