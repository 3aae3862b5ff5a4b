"""Engines that span several nodes: a node's part of an engine, and the processes on all nodes but the first.

The first node runs vLLM itself, with the scheduler. The other nodes run only ranks, which execute the first
node's calls. It is the same as vLLM's own multi-node start with its multiprocessing executor (``--nnodes``,
``--node-rank``, ``--master-addr``), but with Ray actors instead of shell commands.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

LlmArguments: TypeAlias = dict[str, Any]
"""Arguments of vLLM's ``LLM``, the user's included. vLLM checks them."""


@dataclass(frozen=True, slots=True)
class Part:
    """One node's part of an engine.

    Attributes:
        node: index of the node in the engine; 0 for the node that returns results.
        nodes: number of nodes of the engine; all have the same number of ranks.
        address, port: address and port on the first node, to which the ranks of all nodes connect.
    """

    node: int
    nodes: int
    address: str
    port: int

    def options(self) -> LlmArguments:
        """Return arguments of ``LLM`` in addition to those of every engine. For several nodes, vLLM accepts
        its executor only by name."""
        return {
            "nnodes": self.nodes,
            "node_rank": self.node,
            "master_addr": self.address,
            "master_port": self.port,
            "distributed_executor_backend": "mp",
        }


class Follower:
    """An engine's ranks on a node other than the first. They execute the calls of the first node's executor.

    Args:
        options: arguments of ``LLM``, including those of the node's ``Part``.
    """

    def __init__(self, options: LlmArguments) -> None:
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.executor.multiproc_executor import MultiprocExecutor

        self._executor = MultiprocExecutor(EngineArgs(**options).create_engine_config(headless=True))
        self._processes = [worker.proc for worker in self._executor.workers]

    @property
    def is_alive(self) -> bool:
        """True while all processes of this node are running."""
        return all(process.is_alive() for process in self._processes)

    def shutdown(self) -> None:
        """End the processes of this node."""
        self._executor.shutdown()
