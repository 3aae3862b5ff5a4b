"""Whether processes of this host can compute together: a real all-reduce, by the way that a run's workers meet."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Timer

from megarl.doctor.all_reduce import NUMBERS, PORT_MARK
from megarl.doctor.check import Check, Verdict

ROOM = "network"
DEADLINE_S = 180.0


def check_network(gpus: int = 0) -> Iterator[Check]:
    """Gloo in any case, NCCL where there are GPUs that torch can use."""
    yield check_all_reduce("gloo", 2)
    if gpus:
        yield check_all_reduce("nccl", min(gpus, 2))


def check_all_reduce(backend: str, world_size: int, deadline_s: float = DEADLINE_S) -> Check:
    """Let ``world_size`` processes add up numbers over loopback; one alone where there is one GPU."""
    name = f"{backend} all-reduce"
    # Rank 0 says which port it has bound before the others are started, as in a run.
    processes = [_start(backend, 0, world_size, 0)]

    def stop() -> None:
        for process in processes:
            process.kill()

    def finished(process: subprocess.Popen[str]) -> tuple[str, str]:
        """What a process wrote; one that fails ends the others, which would wait for it."""
        answer = process.communicate()
        if process.returncode:
            stop()
        return answer

    timer = Timer(deadline_s, stop)
    timer.start()
    try:
        lines = iter(processes[0].stdout.readline, "") if processes[0].stdout is not None else ()
        port = next((line for line in lines if line.startswith(PORT_MARK)), None)
        if port is not None:
            processes += [_start(backend, rank, world_size, int(port.removeprefix(PORT_MARK))) for rank in range(1, world_size)]
        with ThreadPoolExecutor(world_size) as waiting:
            answers = list(waiting.map(finished, processes))
        late = not timer.is_alive()
    finally:
        timer.cancel()
        stop()
        for process in processes:
            process.wait()
    failed = sorted((rank for rank, process in enumerate(processes) if process.returncode), key=lambda rank: processes[rank].returncode < 0)
    processes_text = f"{world_size} processes" if world_size > 1 else "1 process, as there is one GPU"
    if not failed:
        seconds = max((float(output.split()[-1]) for output, _ in answers if output.split()), default=0.0)
        return Check(ROOM, name, Verdict.OK, f"{processes_text} added {NUMBERS * 4 // 2**20} MiB over loopback in {seconds * 1e3:.0f} ms")
    said = [line for line in answers[failed[0]][1].strip().splitlines() if line.strip()]
    reason = f"no end within {deadline_s:g} s" if late else (said[-1] if said else f"exit code {processes[failed[0]].returncode}")
    fix = "GLOO_SOCKET_IFNAME=lo megarl doctor   (if that helps, see what the host name resolves to: /etc/hosts)"
    if backend == "nccl":
        fix = "NCCL_DEBUG=INFO NCCL_SOCKET_IFNAME=lo megarl doctor   (says what NCCL tries)"
    return Check(ROOM, name, Verdict.FAILED, f"rank {failed[0]} of {processes_text}: {reason}", fix)


def _start(backend: str, rank: int, world_size: int, port: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "megarl.doctor.all_reduce", backend, str(rank), str(world_size), str(port)]
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
