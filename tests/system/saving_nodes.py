"""Programs for runs over two nodes of Ray on this host whose checkpoints wait in the memory of both.

``python -m tests.system.saving_nodes cluster`` starts the nodes ``head`` (without places), ``n1`` and ``n2``,
prints the address, and takes lines ``remove NAME`` and ``add NAME``, each answered by ``done``, until its
standard input ends.

``python -m tests.system.saving_nodes train MODE CONFIG RUN_DIR KEY=VALUE ...`` is ``megarl train`` on the
cluster of ``RAY_ADDRESS``. Of each checkpoint that waits in memory it writes to ``RUN_DIR.places`` what lies
on which node, and at the second one it does something: see ``MODES``.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

from megarl.checkpoint.background import memory_of
from tests.node_writers import writer_of


def run_cluster() -> None:
    import ray
    from ray.cluster_utils import Cluster

    cluster = Cluster()

    def add(name: str, cpus: int = 1) -> Any:
        return cluster.add_node(
            num_cpus=cpus, node_name=name, include_dashboard=False, object_store_memory=80_000_000
        )

    nodes = {"head": add("head", 0), **{name: add(name) for name in ("n1", "n2")}}
    ray.init(address=cluster.address, log_to_driver=False)
    sys.stdout.write(f"\naddress {cluster.address}\n")
    sys.stdout.flush()
    for line in sys.stdin:
        what, name = line.split()
        if what == "add":
            nodes[name] = add(name)
        else:
            cluster.remove_node(nodes.pop(name), allow_graceful=False)
        sys.stdout.write("\ndone\n")
        sys.stdout.flush()
    ray.shutdown()
    cluster.shutdown()


class Disturbance:
    """What happens at the second checkpoint of a run; the processes of the nodes stand still from before it
    is to be written.

    Args:
        checkpoint_dir: of the run.
        names: of the nodes, by Ray's ids.
        other: id of a node with ranks that is not the driver's.
    """

    def __init__(self, checkpoint_dir: Path, names: dict[str, str], other: str) -> None:
        self.names, self.other = names, other
        self.writers = {node: writer_of(checkpoint_dir, node) for node in names}
        for writer in self.writers.values():
            writer.suspend()

    def go_on(self) -> None:
        """Nothing happens."""
        self._resume(self.writers)

    def kill(self) -> None:
        """The process of the other node is killed, and then that node has no room for the next one."""
        self.writers[self.other].kill()
        self._resume(set(self.writers) - {self.other})

    def stop(self) -> None:
        """The driver is asked to stop."""
        os.kill(os.getpid(), signal.SIGTERM)
        self._resume(self.writers)

    def die(self) -> None:
        """The driver is killed."""
        os.kill(os.getpid(), signal.SIGKILL)

    def hold(self) -> None:
        """The process of the other node stands still, and that of the driver's is through."""
        self._resume(set(self.writers) - {self.other})

    def _resume(self, nodes: Any) -> None:
        for node in nodes:
            self.writers[node].resume()


MODES: dict[str, Callable[[Disturbance], None]] = {
    "plain": Disturbance.go_on,
    "kill": Disturbance.kill,
    "stop": Disturbance.stop,
    "die": Disturbance.die,
    "hold": Disturbance.hold,
}


def train(mode: str, config: str, run_dir: Path, *overrides: str) -> int:
    """Exit code of ``megarl train``."""
    import ray

    from megarl.cli import main
    from megarl.run.memory_of_nodes import MemoryOfNodes, WriteOfNodes

    real, count = MemoryOfNodes.write, 0
    real_need, other = MemoryOfNodes._needed_on, ""

    def write(memory: MemoryOfNodes, target: Path) -> WriteOfNodes:
        nonlocal count, other
        count += 1
        names = {node: memory.name_of(node) for node in memory._actors}
        here = ray.get_runtime_context().get_node_id()
        other = next(node for node in sorted(names, key=names.__getitem__) if node != here)
        found = {names[node]: files_below(memory_of(target.parent, node)) for node in names}
        told = {"checkpoint": target.name, "files": found, "other": names[other]}
        if count != 2:
            begun = real(memory, target)
        else:
            disturbance = Disturbance(target.parent, names, other)
            told["writers"] = {names[node]: writer.pid for node, writer in disturbance.writers.items()}
            begun = real(memory, target)
        with run_dir.with_name(f"{run_dir.name}.places").open("a") as file:
            file.write(json.dumps(told) + "\n")
        if count == 2:
            MODES[mode](disturbance)
        return begun

    def needed(memory: MemoryOfNodes, node: str, of_all: int) -> int:
        return 2**60 if mode == "kill" and count == 2 and node == other else real_need(memory, node, of_all)

    with patch.object(MemoryOfNodes, "write", write), patch.object(MemoryOfNodes, "_needed_on", needed):
        return main(["train", config, f"run_dir={run_dir}", *overrides])


def files_below(place: Path) -> list[str]:
    return sorted(path.relative_to(place).as_posix() for path in place.rglob("*") if path.is_file())


if __name__ == "__main__":
    if sys.argv[1] == "cluster":
        run_cluster()
    else:
        sys.exit(train(sys.argv[2], sys.argv[3], Path(sys.argv[4]), *sys.argv[5:]))
