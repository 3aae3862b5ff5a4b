"""Check that processes on this host can compute together: an all-reduce, connected by the same rendezvous as
a run's workers.

``python -m megarl.doctor.network BACKEND RANK WORLD_SIZE PORT`` runs one of the processes. Rank 0 gets port
0, binds a free port, and prints ``port N``.
"""

from __future__ import annotations

import datetime
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Timer

from megarl import env
from megarl.distributed import rendezvous
from megarl.doctor.check import Check, Room

ADDRESS = "127.0.0.1"
NUMBERS = 1 << 20
PORT_MARK = "port "
_RUN_ID = "megarl-doctor"


def main(arguments: Sequence[str]) -> int:
    """Join the process group, all-reduce a tensor, and print the seconds of that all-reduce. Return 1 if the
    sum is wrong, else 0."""
    import torch
    import torch.distributed as dist

    backend, rank, world_size, port = arguments[0], *map(int, arguments[1:])
    env.set_variables({"RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_RANK": str(rank)})
    if rank == 0:
        port = rendezvous.open_listener(ADDRESS)
        sys.stdout.write(f"{PORT_MARK}{port}\n")
        sys.stdout.flush()
    rendezvous.set_endpoint(rendezvous.Endpoint(ADDRESS, port, _RUN_ID))
    device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    rendezvous.init_process_group(backend, datetime.timedelta(seconds=60), device)
    numbers = torch.full((NUMBERS,), float(rank + 1), device=device)
    # The first collective also connects the processes, so do not measure it.
    dist.barrier()
    start = time.perf_counter()
    dist.all_reduce(numbers)
    # A float32 sum of a million numbers would be rounded.
    total = float(numbers.double().sum().item())
    seconds = time.perf_counter() - start
    dist.destroy_process_group()
    sys.stdout.write(f"{seconds}\n")
    return 0 if total == NUMBERS * world_size * (world_size + 1) / 2 else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))


ROOM = Room("network")
DEADLINE_S = 180.0


def check_network(gpus: int = 0) -> Iterator[Check]:
    """Check an all-reduce over gloo and, if torch can use GPUs, over NCCL."""
    yield check_all_reduce("gloo", 2)
    if gpus:
        yield check_all_reduce("nccl", min(gpus, 2))


def check_all_reduce(backend: str, world_size: int, deadline_s: float = DEADLINE_S) -> Check:
    """Check that processes can all-reduce over loopback.

    Args:
        backend: ``gloo`` or ``nccl``.
        world_size: number of processes; 1 on a machine with a single GPU.
        deadline_s: seconds after which the processes are killed.
    """
    name = f"{backend} all-reduce"
    # Rank 0 must bind its port first, because the other ranks need its number.
    processes = [_start(backend, 0, world_size, 0)]

    def stop() -> None:
        for process in processes:
            process.kill()

    def finished(process: subprocess.Popen[str]) -> tuple[str, str]:
        """Return the output of a process. If it failed, kill the others, which would wait for it."""
        answer = process.communicate()
        if process.returncode:
            stop()
        return answer

    # Reading a pipe has no timeout. The timer kills the processes, which ends the reads below.
    timer = Timer(deadline_s, stop)
    timer.start()
    try:
        lines = iter(processes[0].stdout.readline, "") if processes[0].stdout is not None else ()
        port = next((line for line in lines if line.startswith(PORT_MARK)), None)
        if port is not None:
            processes += [
                _start(backend, rank, world_size, int(port.removeprefix(PORT_MARK)))
                for rank in range(1, world_size)
            ]
        # Read all pipes in parallel, because a process blocks when its pipe is full.
        with ThreadPoolExecutor(world_size) as waiting:
            answers = list(waiting.map(finished, processes))
        # A timer that has fired is no longer alive.
        late = not timer.is_alive()
    finally:
        timer.cancel()
        stop()
        for process in processes:
            process.wait()
    # Killed processes have a negative exit code. Sort them last, because those that failed on their own show
    # the cause.
    failed = sorted(
        (rank for rank, process in enumerate(processes) if process.returncode),
        key=lambda rank: processes[rank].returncode < 0,
    )
    processes_text = f"{world_size} processes" if world_size > 1 else "1 process, as there is one GPU"
    if not failed:
        # Libraries may print other text before the seconds.
        seconds = max((float(output.split()[-1]) for output, _ in answers if output.split()), default=0.0)
        return ROOM.ok(
            name, f"{processes_text} added {NUMBERS * 4 // 2**20} MiB over loopback in {seconds * 1e3:.0f} ms"
        )
    errors = [line for line in answers[failed[0]][1].strip().splitlines() if line.strip()]
    reason = (
        f"not finished within {deadline_s:g} s"
        if late
        else (errors[-1] if errors else f"exit code {processes[failed[0]].returncode}")
    )
    fix = (
        "GLOO_SOCKET_IFNAME=lo megarl doctor   (if that helps, see what the host name resolves to: "
        "/etc/hosts)"
    )
    if backend == "nccl":
        fix = "NCCL_DEBUG=INFO NCCL_SOCKET_IFNAME=lo megarl doctor   (shows what NCCL tries)"
    return ROOM.failed(name, f"rank {failed[0]} of {processes_text}: {reason}", fix)


def _start(backend: str, rank: int, world_size: int, port: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "megarl.doctor.network", backend, str(rank), str(world_size), str(port)]
    return subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
