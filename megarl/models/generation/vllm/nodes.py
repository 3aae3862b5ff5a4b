"""Engines over several nodes: each node's part of an engine, and what runs on the nodes behind its first one.

The first node runs vLLM itself, with the scheduler; the others run its ranks there, which hear the first
one's calls. This is vLLM's own start over nodes by its executor of processes (``--nnodes``, ``--node-rank``,
``--master-addr``), with Ray's actors in place of commands.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Part:
    """The share of one node in an engine.

    Attributes:
        node: its number in the engine, 0 for the one that answers.
        nodes: of the engine; each has as many of its ranks.
        address, port: of the first node, at which the ranks of all nodes meet.
    """

    node: int
    nodes: int
    address: str
    port: int

    def options(self) -> dict[str, Any]:
        """Arguments of ``LLM``, next to those of every engine. Over nodes vLLM takes its executor by name
        only."""
        return {
            "nnodes": self.nodes,
            "node_rank": self.node,
            "master_addr": self.address,
            "master_port": self.port,
            "distributed_executor_backend": "mp",
        }


class Follower:
    """The ranks of an engine on a node that is not its first: they do what the first node's executor asks
    for.

    Args:
        options: arguments of ``LLM``, those of the node's ``Part`` among them.
    """

    def __init__(self, options: dict[str, Any]) -> None:
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.executor.multiproc_executor import MultiprocExecutor

        self._executor = MultiprocExecutor(EngineArgs(**options).create_engine_config(headless=True))
        self._processes = [worker.proc for worker in self._executor.workers]

    @property
    def is_alive(self) -> bool:
        """True while none of its processes has ended."""
        return all(process.is_alive() for process in self._processes)

    def shutdown(self) -> None:
        """End its processes."""
        self._executor.shutdown()
