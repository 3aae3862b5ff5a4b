"""Meeting over a port that is bound once and kept: many groups at once while others grab every port they can,
and wrong members."""

from __future__ import annotations

import datetime
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

import pytest
import torch.distributed as dist

from megarl.distributed.rendezvous import Endpoint, check_membership
from megarl.distributed.virtual_cluster import free_port
from megarl.errors import ClusterError, DeadlineError
from tests.tiers import slow

# Children are forked after torch is imported, so that forty ranks start in a moment.
MANY_GROUPS = """
import os, socket, sys, threading
import torch, torch.distributed as dist
from megarl.distributed import rendezvous

def rank_main(rank, endpoint):
    os.environ.update(RANK=str(rank), WORLD_SIZE="2")
    rendezvous.set_endpoint(endpoint)
    rendezvous.init_process_group("gloo")
    total = torch.tensor([endpoint.port * (rank + 1.0)], dtype=torch.float64)
    dist.all_reduce(total)
    assert total.item() == 3.0 * endpoint.port, (total, endpoint)
    dist.barrier()

def group_main(number):
    port = rendezvous.open_listener("127.0.0.1")
    endpoint = rendezvous.Endpoint("127.0.0.1", port, f"run{number}")
    peer = os.fork()
    if peer == 0:
        rendezvous._rendezvous.listener.close()
        rendezvous._rendezvous.listener = None
        run(rank_main, 1, endpoint)
    thieves = [socket.socket() for _ in range(50)]
    for thief in thieves:
        thief.bind(("127.0.0.1", 0))
    try:
        socket.socket().bind(("127.0.0.1", port))
    except OSError:
        pass
    else:
        raise AssertionError("the promised port was free for others")
    rank_main(0, endpoint)
    _, status = os.waitpid(peer, 0)
    assert status == 0, status

def run(main, *arguments):
    try:
        main(*arguments)
    except BaseException:
        import traceback
        traceback.print_exc()
        os._exit(1)
    os._exit(0)

if __name__ == "__main__":
    children = []
    for number in range(20):
        child = os.fork()
        if child == 0:
            run(group_main, number)
        children.append(child)
    failed = [child for child in children if os.waitpid(child, 0)[1] != 0]
    print("failed:", len(failed))
"""


@slow
def test_twenty_groups_at_once_do_not_collide(tmp_path: Path) -> None:
    script = tmp_path / "many_groups.py"
    script.write_text(MANY_GROUPS)
    environment = {
        **os.environ,
        "PYTHONPATH": str(Path(__file__).resolve().parents[2]),
        "OMP_NUM_THREADS": "1",
    }
    result = subprocess.run(
        [sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=300
    )
    assert result.stdout.strip() == "failed: 0", result.stderr[-4000:]


def membership_store() -> dist.Store:
    return dist.HashStore()


def test_members_that_agree_are_let_in() -> None:
    store = membership_store()
    endpoint = Endpoint("127.0.0.1", 1, "a")
    for rank in range(3):
        check_membership(store, endpoint, rank, 3)


@pytest.mark.parametrize(
    ("run_id", "rank", "world_size", "message"),
    [
        ("a", 1, 4, r"WORLD_SIZE = 4, the group at 127\.0\.0\.1:1 has WORLD_SIZE = 3"),
        ("a", 0, 3, "rank 0 at .* is taken"),
        ("b", 1, 3, "another run id .*: another group uses that address"),
        ("a", 3, 3, r"RANK = 3 .*\[0, 3\)"),
        ("a", -1, 3, r"RANK = -1 .*\[0, 3\)"),
    ],
)
def test_members_that_do_not_fit_are_told_why(run_id: str, rank: int, world_size: int, message: str) -> None:
    store = membership_store()
    check_membership(store, Endpoint("127.0.0.1", 1, "a"), 0, 3)
    with pytest.raises(ClusterError, match=message):
        check_membership(store, Endpoint("127.0.0.1", 1, run_id), rank, world_size)


def test_who_comes_before_rank_0_does_not_decide_whose_group_it_is() -> None:
    store = membership_store()
    with ThreadPoolExecutor(2) as pool:
        other_run = pool.submit(check_membership, store, Endpoint("127.0.0.1", 1, "b"), 1, 3)
        other_size = pool.submit(check_membership, store, Endpoint("127.0.0.1", 1, "a"), 2, 4)
        assert not wait([other_run, other_size], timeout=0.1).done
        check_membership(store, Endpoint("127.0.0.1", 1, "a"), 0, 3)
        with pytest.raises(ClusterError, match=r"another run id .*: another group uses that address"):
            other_run.result()
        with pytest.raises(ClusterError, match=r"WORLD_SIZE = 4, the group .* has WORLD_SIZE = 3"):
            other_size.result()
    check_membership(store, Endpoint("127.0.0.1", 1, "a"), 1, 3)


def test_a_rank_0_that_does_not_come_is_named() -> None:
    store = membership_store()
    store.set_timeout(datetime.timedelta(milliseconds=10))
    with pytest.raises(
        DeadlineError,
        match=r"rank 1 at 127\.0\.0\.1:1 failed: rank 0 did not send its run_id .*see why rank 0 stopped",
    ):
        check_membership(store, Endpoint("127.0.0.1", 1, "a"), 1, 3)


def test_a_process_of_another_run_is_turned_away_before_any_group_is_made() -> None:
    code = (
        "import os, threading, torch\n"
        "from megarl.distributed import rendezvous\n"
        "from megarl.errors import ClusterError\n"
        "os.environ.update(RANK='0', WORLD_SIZE='2')\n"
        "port = rendezvous.open_listener('127.0.0.1')\n"
        "if os.fork():\n"
        "    rendezvous.set_endpoint(rendezvous.Endpoint('127.0.0.1', port, 'ours'))\n"
        "    threading.Thread(target=rendezvous.init_process_group, args=('gloo',), daemon=True).start()\n"
        "    os._exit(os.waitstatus_to_exitcode(os.wait()[1]))\n"
        "rendezvous._rendezvous.listener = None\n"
        "os.environ['RANK'] = '1'\n"
        "rendezvous.set_endpoint(rendezvous.Endpoint('127.0.0.1', port, 'theirs'))\n"
        "try: rendezvous.init_process_group('gloo')\n"
        "except ClusterError as error: print(error)\n"
        "os._exit(0)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    result = subprocess.run(
        [sys.executable, "-u", "-c", code], env=environment, capture_output=True, text=True, timeout=300
    )
    assert "rank 1 has another run id" in result.stdout, result.stdout + result.stderr[-3000:]


def test_a_foreign_address_cannot_be_bound() -> None:
    code = (
        "from megarl.distributed import rendezvous\n"
        "from megarl.errors import ClusterError, StateError\n"
        "try: rendezvous.open_listener('198.51.100.7')\n"
        "except ClusterError as error: print(error)\n"
        "rendezvous.open_listener('127.0.0.1')\n"
        "try: rendezvous.open_listener('127.0.0.1')\n"
        "except StateError as error: print(error)\n"
        "import sys; assert 'torch' not in sys.modules and 'ray' not in sys.modules\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    result = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=300
    )
    lines = result.stdout.splitlines()
    assert result.returncode == 0, result.stderr
    assert "'198.51.100.7' cannot be bound" in lines[0]
    assert "is open already" in lines[1]


def test_under_torchrun_the_environment_says_where_to_meet() -> None:
    port = free_port("127.0.0.1")
    code = (
        "import torch.distributed as dist\n"
        "from megarl.distributed import rendezvous\n"
        "rendezvous.init_process_group('gloo')\n"
        "print(dist.get_world_size())\n"
    )
    variables = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    environment = {**os.environ, **variables, "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    result = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=300
    )
    assert result.stdout.strip() == "1", result.stderr
