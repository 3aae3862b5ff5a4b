"""The watches over Ray's processes: one that is gone, stopped or silent is told of once and in time, and one
that comes back is not.

Here, small processes stand where Ray's do; real ones are stopped and killed in
``tests/system/test_faults.py`` and ``test_ray_start.py``.
"""

from __future__ import annotations

import errno
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from megarl.distributed import ray_watch
from megarl.distributed.ray_watch import (
    CONTROL,
    RAYLET,
    PortWatch,
    ProcessWatch,
    StartWatch,
    greet,
    own_raylet,
    silent_seconds,
    watched_join,
)

WAIT = 30.0
SILENT = 0.4
ANSWERING = """
import socket, sys
server = socket.create_server(("127.0.0.1", int(sys.argv[1])))
print(server.getsockname()[1], flush=True)
while True:
    connection, _ = server.accept()
    said = connection.recv(1024)
    assert said.startswith(b"PRI * HTTP/2.0"), said
    connection.sendall(bytes([0, 0, 0, 4, 0, 0, 0, 0, 0]))
    connection.close()
"""
"""A process that greets back, as a gRPC server does."""


class Server:
    """That process: its address, and what a signal makes of it."""

    def __init__(self, port: int = 0) -> None:
        command = [sys.executable, "-c", ANSWERING, str(port)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        assert self.process.stdout is not None
        self.port = int(self.process.stdout.readline())
        self.address = f"127.0.0.1:{self.port}"

    def send(self, number: signal.Signals) -> None:
        os.kill(self.process.pid, number)
        if number == signal.SIGSTOP:
            while psutil.Process(self.process.pid).status() != psutil.STATUS_STOPPED:
                pass

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.communicate()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_watch, "_LOOK_SECONDS", 0.01)
    monkeypatch.setattr(ray_watch, "REFUSED_SECONDS", 0.2)
    monkeypatch.setattr(ray_watch, "_ANSWER_SECONDS", 0.1)


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    yield made
    made.end()


def test_one_that_answers_is_not_lost_and_one_that_is_gone_is_told_of_once(server: Server) -> None:
    told: queue.Queue[str] = queue.Queue()
    watch = PortWatch(CONTROL, server.address, WAIT, told.put)
    with pytest.raises(queue.Empty):
        told.get(timeout=0.5)
    server.end()
    message = told.get(timeout=WAIT)
    assert f"{CONTROL} at {server.address} is gone" in message and "Fix: " in message
    watch._thread.join(WAIT)
    assert told.empty() and not watch._thread.is_alive()


def test_one_that_is_stopped_is_told_of_though_its_port_is_open(server: Server) -> None:
    told: queue.Queue[str] = queue.Queue()
    watch = PortWatch(RAYLET, server.address, SILENT, told.put)
    server.send(signal.SIGSTOP)
    message = told.get(timeout=WAIT)
    assert f"{RAYLET} at {server.address} has not answered for " in message and "Fix: " in message
    with socket.create_connection(("127.0.0.1", server.port)):
        pass
    watch.close()


def test_one_that_was_stopped_for_a_moment_is_not_lost(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    late, answers = threading.Event(), threading.Event()

    def greeted(address: str, timeout_s: float) -> int:
        fault = greet(address, timeout_s)
        if fault:
            late.set()
        elif late.is_set():
            answers.set()
        return fault

    monkeypatch.setattr(ray_watch, "greet", greeted)
    watch = PortWatch(CONTROL, server.address, WAIT, told.append)
    server.send(signal.SIGSTOP)
    assert late.wait(WAIT)
    server.send(signal.SIGCONT)
    assert answers.wait(WAIT)
    watch.close()
    assert told == []


def test_one_that_is_started_anew_in_time_is_not_lost(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_watch, "REFUSED_SECONDS", WAIT)
    told: list[str] = []
    refused, answers = threading.Event(), threading.Event()

    def greeted(address: str, timeout_s: float) -> int:
        fault = greet(address, timeout_s)
        if fault == errno.ECONNREFUSED:
            refused.set()
        elif refused.is_set() and not fault:
            answers.set()
        return fault

    monkeypatch.setattr(ray_watch, "greet", greeted)
    watch = PortWatch(CONTROL, server.address, WAIT, told.append)
    server.end()
    assert refused.wait(WAIT)
    again = Server(server.port)
    try:
        assert answers.wait(WAIT)
    finally:
        watch.close()
        again.end()
    assert told == []


def test_what_closes_the_connection_at_a_greeting_lives() -> None:
    """As a server does that wants TLS."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def close() -> None:
            connection, _ = listening.accept()
            connection.recv(1)
            connection.close()

        closing = threading.Thread(target=close)
        closing.start()
        found = greet(f"127.0.0.1:{listening.getsockname()[1]}", WAIT)
        closing.join()
    # unread bytes make it a reset, which is an answer as well
    assert found in (0, errno.ECONNRESET)


def test_a_process_without_free_descriptors_does_not_call_ray_lost(
    server: Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*arguments: object, **options: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    told: list[str] = []
    monkeypatch.setattr(socket, "create_connection", refuse)
    watch = PortWatch(CONTROL, server.address, SILENT, told.append)
    watch._thread.join(2 * SILENT)
    watch.close()
    assert told == [] and "Too many open files" in caplog.text


@pytest.mark.parametrize(("least_s", "silent_s"), [(300.0, 40.0), (20.0, 14.0), (float("inf"), 40.0)])
def test_a_silence_is_over_before_the_bound_of_a_phase(least_s: float, silent_s: float) -> None:
    assert silent_seconds(least_s) == pytest.approx(silent_s)


def started(program: str, *arguments: str, directory: Path) -> subprocess.Popen[bytes]:
    """A process whose program has a name of Ray's."""
    path = directory / program
    path.symlink_to("/bin/sh")
    return subprocess.Popen([str(path), *arguments])


def test_a_control_process_that_is_killed_while_ray_starts_is_told_of(tmp_path: Path) -> None:
    told: queue.Queue[str] = queue.Queue()
    with StartWatch(WAIT, told.put) as watch:
        other = started("log_monitor", "-c", "read x", directory=tmp_path)
        process = started("gcs_server", "-c", "sleep 600", directory=tmp_path)
        for each in (other, process):
            watch.see(each)
        other.kill()
        other.wait()
        assert told.empty()
        process.kill()
        message = told.get(timeout=WAIT)
        assert f"while Ray started: {CONTROL}, process {process.pid}, is gone" in message
    process.wait()


def test_a_control_process_that_ends_by_itself_is_left_to_ray(tmp_path: Path) -> None:
    """It says why, and a start of new processes may well succeed."""
    told: list[str] = []
    with StartWatch(WAIT, told.append) as watch:
        process = started("gcs_server", "-c", "exit 3", directory=tmp_path)
        watch.see(process)
        watch._watches[0]._thread.join(WAIT)
    assert told == [] and process.returncode == 3


def test_a_process_that_stays_stopped_is_told_of_and_one_that_goes_on_is_not(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: queue.Queue[str] = queue.Queue()
    looked: queue.Queue[bool] = queue.Queue()
    is_stopped = ProcessWatch._is_stopped

    def look(watch: ProcessWatch) -> bool:
        looked.put(found := is_stopped(watch))
        return found

    monkeypatch.setattr(ProcessWatch, "_is_stopped", look)
    server.send(signal.SIGSTOP)
    patient = ProcessWatch(RAYLET, server.process.pid, WAIT, told.put)
    while not looked.get(timeout=WAIT):
        pass
    server.send(signal.SIGCONT)
    while looked.get(timeout=WAIT):
        pass
    patient.close()
    assert told.empty()
    server.send(signal.SIGSTOP)
    watch = ProcessWatch(RAYLET, server.process.pid, SILENT, told.put)
    assert f"{RAYLET}, process {server.process.pid}, has been stopped by a signal for " in told.get(
        timeout=WAIT
    )
    watch.close()


def test_a_ray_of_somebody_else_is_watched_while_it_is_joined(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: queue.Queue[str] = queue.Queue()
    monkeypatch.setattr(ray_watch, "leave", told.put)
    for address in ("auto", "ray://127.0.0.1:1", "127.0.0.1:1"):
        # the last one does not answer at all, which Ray itself says
        with watched_join(address, SILENT), pytest.raises(queue.Empty):
            told.get(timeout=2 * SILENT)
    with watched_join(server.address, SILENT):
        server.send(signal.SIGSTOP)
        assert f"while Ray was joined: {CONTROL} at {server.address} has not answered" in told.get(
            timeout=WAIT
        )


LISTENING = (
    "import socket, sys; s = socket.socket(socket.AF_UNIX); s.bind(sys.argv[1]); s.listen(); "
    "print('.', flush=True); sys.stdin.read()"
)


@pytest.fixture
def raylet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[subprocess.Popen[bytes]]:
    """Another process that listens where Ray says that the raylet does."""
    path = str(tmp_path / "raylet")
    process = subprocess.Popen(
        [sys.executable, "-c", LISTENING, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdout is not None and process.stdout.readline()
    monkeypatch.setattr("ray._private.worker._global_node", SimpleNamespace(raylet_socket_name=path))
    yield process
    process.kill()
    process.communicate()


def test_a_raylet_that_is_killed_is_told_of_once(raylet: subprocess.Popen[bytes]) -> None:
    told: queue.Queue[str] = queue.Queue()
    process_id = own_raylet()
    assert process_id == raylet.pid
    watch = ProcessWatch(RAYLET, process_id, None, told.put)
    with pytest.raises(queue.Empty):
        told.get(timeout=0.2)
    raylet.kill()
    message = told.get(timeout=WAIT)
    assert f"process {raylet.pid}, is gone" in message and "Fix: " in message
    watch.close()
    assert told.empty()


def test_a_watch_that_was_closed_says_nothing_of_a_raylet_that_ends(raylet: subprocess.Popen[bytes]) -> None:
    told: list[str] = []
    watch = ProcessWatch(RAYLET, raylet.pid, None, told.append)
    watch.close()
    raylet.kill()
    raylet.wait(WAIT)
    assert told == [] and not watch._thread.is_alive()


def test_where_no_raylet_can_be_seen_none_is_watched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for node in (None, SimpleNamespace(), SimpleNamespace(raylet_socket_name=str(tmp_path / "nothing"))):
        monkeypatch.setattr("ray._private.worker._global_node", node)
        assert own_raylet() is None
