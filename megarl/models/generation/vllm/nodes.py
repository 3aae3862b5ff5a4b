"""Engines over several nodes: each node's part of an engine, and the processes on the nodes after the first.

The first node runs vLLM itself, with the scheduler; the other nodes run only ranks, which receive the first
node's calls. This is vLLM's own start over nodes by its multiprocessing executor (``--nnodes``,
``--node-rank``, ``--master-addr``), with Ray actors instead of shell commands.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Part:
    """The share of one node in an engine.

    Attributes:
        node: number of the node in the engine, 0 for the one that returns the results.
        nodes: number of nodes of the engine; each has the same number of ranks.
        address, port: those of the first node, to which the ranks of all nodes connect.
    """

    node: int
    nodes: int
    address: str
    port: int

    def options(self) -> dict[str, Any]:
        """Return the arguments of ``LLM`` that are added to those of every engine. Over nodes vLLM accepts
        its executor only by name."""
        return {
            "nnodes": self.nodes,
            "node_rank": self.node,
            "master_addr": self.address,
            "master_port": self.port,
            "distributed_executor_backend": "mp",
        }


class Follower:
    """The ranks of an engine on a node that is not its first: they run the calls of the first node's
    executor.

    Args:
        options: arguments of ``LLM``, including those of the node's ``Part``.
    """

    def __init__(self, options: dict[str, Any]) -> None:
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.executor.multiproc_executor import MultiprocExecutor

        self._executor = MultiprocExecutor(EngineArgs(**options).create_engine_config(headless=True))
        self._processes = [worker.proc for worker in self._executor.workers]

    @property
    def is_alive(self) -> bool:
        """True while all of its processes are running."""
        return all(process.is_alive() for process in self._processes)

    def shutdown(self) -> None:
        """End the processes."""
        self._executor.shutdown()
