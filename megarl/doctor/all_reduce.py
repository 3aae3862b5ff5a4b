"""One process of the doctor's all-reduce: ``python -m megarl.doctor.all_reduce BACKEND RANK WORLD_SIZE PORT``.

Rank 0 is started with port 0, binds one and writes ``port N`` to standard output, after whatever an import may have said there.
"""

from __future__ import annotations

import datetime
import sys
import time
from collections.abc import Sequence

from megarl import env
from megarl.distributed import rendezvous

ADDRESS = "127.0.0.1"
NUMBERS = 1 << 20
PORT_MARK = "port "
_RUN_ID = "megarl-doctor"


def main(arguments: Sequence[str]) -> int:
    """Meet the other processes and add numbers with them; writes the seconds that one sum took. Exit code 1 for a wrong sum."""
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
    rendezvous.init_process_group(backend, datetime.timedelta(seconds=60))
    numbers = torch.full((NUMBERS,), float(rank + 1), device=device)
    dist.barrier()
    start = time.perf_counter()
    dist.all_reduce(numbers)
    total = float(numbers.double().sum().item())
    seconds = time.perf_counter() - start
    dist.destroy_process_group()
    sys.stdout.write(f"{seconds}\n")
    return 0 if total == NUMBERS * world_size * (world_size + 1) / 2 else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
