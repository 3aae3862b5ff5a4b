"""A control process of Ray that is gone is told of once and in time; one that only does not answer is not taken for gone."""

from __future__ import annotations

import errno
import queue
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from megarl.distributed import ray_watch
from megarl.distributed.ray_watch import RayletWatch, RayWatch, own_raylet

WAIT = 30.0


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_watch, "_LOOK_SECONDS", 0.01)
    monkeypatch.setattr(ray_watch, "REFUSED_SECONDS", 0.2)
    monkeypatch.setattr(ray_watch, "_CONNECT_SECONDS", 0.2)


@pytest.fixture
def server() -> Iterator[socket.socket]:
    """One that listens and never accepts, as a process that has hung."""
    with socket.create_server(("127.0.0.1", 0), backlog=1024) as listening:
        yield listening


def address_of(server: socket.socket) -> str:
    return f"127.0.0.1:{server.getsockname()[1]}"


def test_it_is_told_once_when_nobody_listens_any_more(server: socket.socket) -> None:
    told: queue.Queue[str] = queue.Queue()
    watch, address = RayWatch(address_of(server), told.put), address_of(server)
    with pytest.raises(queue.Empty):
        told.get(timeout=0.5)
    server.close()
    message = told.get(timeout=WAIT)
    assert address in message and "is gone" in message and "Fix: " in message
    watch._thread.join(WAIT)
    assert told.empty() and not watch._thread.is_alive()


def test_one_that_is_started_anew_in_time_is_not_lost(server: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_watch, "REFUSED_SECONDS", WAIT)
    told: list[str] = []
    refused = threading.Event()
    look = RayWatch._look

    def looked(watch: RayWatch) -> int:
        fault = look(watch)
        if fault == errno.ECONNREFUSED:
            refused.set()
        return fault

    monkeypatch.setattr(RayWatch, "_look", looked)
    port = server.getsockname()[1]
    watch = RayWatch(address_of(server), told.append)
    server.close()
    assert refused.wait(WAIT)
    with socket.create_server(("127.0.0.1", port)):
        watch.close()
    assert told == []


def test_a_watch_that_ends_while_ray_is_gone_says_so_at_once(server: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_watch, "REFUSED_SECONDS", 1000.0)
    told: list[str] = []
    ended, lost = RayWatch(address_of(server), told.append), RayWatch(address_of(server), told.append)
    ended.close()
    assert told == []
    server.close()
    lost.close()
    assert len(told) == 1


def test_what_only_does_not_answer_has_longer(server: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    told: queue.Queue[str] = queue.Queue()
    monkeypatch.setattr(RayWatch, "_look", lambda self: errno.ETIMEDOUT)
    monkeypatch.setattr(ray_watch, "SILENT_SECONDS", 1000.0)
    watch = RayWatch(address_of(server), told.put)
    with pytest.raises(queue.Empty):
        told.get(timeout=0.5)
    monkeypatch.setattr(ray_watch, "SILENT_SECONDS", 0.2)
    assert told.get(timeout=WAIT)
    watch.close()


def test_a_process_without_free_descriptors_does_not_call_ray_lost(
    server: socket.socket, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*arguments: object, **options: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    told: list[str] = []
    monkeypatch.setattr(socket, "create_connection", refuse)
    watch = RayWatch(address_of(server), told.append)
    watch._thread.join(0.5)
    watch.close()
    assert told == [] and "Too many open files" in caplog.text


LISTENING = (
    "import socket, sys; s = socket.socket(socket.AF_UNIX); s.bind(sys.argv[1]); s.listen(); print('.', flush=True); sys.stdin.read()"
)


@pytest.fixture
def raylet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[subprocess.Popen[bytes]]:
    """Another process that listens where Ray says that the raylet does."""
    path = str(tmp_path / "raylet")
    process = subprocess.Popen([sys.executable, "-c", LISTENING, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline()
    monkeypatch.setattr("ray._private.worker._global_node", SimpleNamespace(raylet_socket_name=path))
    yield process
    process.kill()
    process.communicate()


def test_a_raylet_that_is_killed_is_told_of_once(raylet: subprocess.Popen[bytes]) -> None:
    told: queue.Queue[str] = queue.Queue()
    process_id = own_raylet()
    assert process_id == raylet.pid
    watch = RayletWatch(process_id, told.put)
    with pytest.raises(queue.Empty):
        told.get(timeout=0.2)
    raylet.kill()
    message = told.get(timeout=WAIT)
    assert f"process {raylet.pid}) is gone" in message and "Fix: " in message
    watch.close()
    assert told.empty()


def test_a_watch_that_was_closed_says_nothing_of_a_raylet_that_ends(raylet: subprocess.Popen[bytes]) -> None:
    told: list[str] = []
    watch = RayletWatch(raylet.pid, told.append)
    watch.close()
    raylet.kill()
    raylet.wait(WAIT)
    assert told == [] and not watch._thread.is_alive()


def test_where_no_raylet_can_be_seen_none_is_watched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for node in (None, SimpleNamespace(), SimpleNamespace(raylet_socket_name=str(tmp_path / "nothing"))):
        monkeypatch.setattr("ray._private.worker._global_node", node)
        assert own_raylet() is None
