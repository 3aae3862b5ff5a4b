"""A program that starts Ray with several nodes on this host and trains over two of them: undisturbed, and
with a node that is lost.

``python -m tests.system.lost_nodes CONFIG DIRECTORY [KEY=VALUE ...]``: runs in ``DIRECTORY/whole`` and
``DIRECTORY/run``. Of the second one a node is removed after its first step; another one joins only then, so
that its places are waited for.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any
from unittest.mock import patch

import ray
from ray.cluster_utils import Cluster

from megarl.config.load import load_config
from megarl.config.validate import validate_config
from megarl.run.run import run
from tests.system.whole_runs import read_rows

LOOK_S = 0.1
JOINS_AFTER_S = 15.0


def main(config_file: str, directory: Path, *further: str) -> None:
    cluster = Cluster()
    add: Any = lambda name, cpus=1: cluster.add_node(  # noqa: E731
        num_cpus=cpus, node_name=name, include_dashboard=False, object_store_memory=80_000_000
    )
    add("head", 0)
    nodes = {name: add(name) for name in ("n1", "n2")}
    ray.init(address=cluster.address, log_to_driver=False)
    overrides = [
        "cluster.num_nodes=2",
        "cluster.gpus_per_node=1",
        "++cluster.max_restarts=1",
        "++cluster.device=cpu",
    ]
    overrides += ["policy.megatron_cfg.tensor_model_parallel_size=1", *further]

    # the node of Ray that the driver speaks to is on this host as well, and has to stay
    here = next(
        node["NodeName"] for node in ray.nodes() if node["NodeID"] == ray.get_runtime_context().get_node_id()
    )
    lost = "n1" if here == "n2" else "n2"

    def train(name: str) -> int:
        return run(validate_config(load_config(config_file, [*overrides, f"run_dir={directory / name}"])))

    def lose_a_node() -> None:
        while not any(row["step"] >= 1 for row in read_rows(directory / "run")):
            time.sleep(LOOK_S)
        cluster.remove_node(nodes[lost], allow_graceful=False)
        while sum(node["Alive"] for node in ray.nodes()) > 2:
            time.sleep(LOOK_S)
        time.sleep(JOINS_AFTER_S)
        # a thread may set no handlers of signals, and the driver of the run has its own
        with patch("ray._private.utils.set_sigterm_handler"):
            add("n3")
        # what a thread has started ends with it
        threading.Event().wait()

    def lose_or_end() -> None:
        try:
            lose_a_node()
        except BaseException:
            # else the run would wait for what never comes
            traceback.print_exc()
            os._exit(3)

    codes = [train("whole")]
    threading.Thread(target=lose_or_end, daemon=True).start()
    codes.append(train("run"))
    sys.stdout.write(
        f"\ncodes {codes} without {lost}: "
        f"{sorted(node['NodeName'] for node in ray.nodes() if node['Alive'])}\n"
    )
    ray.shutdown()
    cluster.shutdown()


if __name__ == "__main__":
    from tests.system import lost_nodes

    lost_nodes.main(sys.argv[1], Path(sys.argv[2]), *sys.argv[3:])
