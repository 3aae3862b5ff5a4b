"""Asynchronous checkpoints on several nodes. Each rank leaves its part in the shared memory of its node, and
an actor on each node writes them to disk while training continues.

The actors are not workers, so they finish the write even if the workers are lost after ``hold``. When all
nodes have finished, the driver writes the manifest from their reports. The actor's class is in
``megarl.checkpoint.node_memory``.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from converters.files.atomic import fsync_directory
from megarl.checkpoint.manifest import Entry, verify, write_manifest
from megarl.checkpoint.node_memory import NodeMemory
from megarl.distributed import ray_calls
from megarl.distributed.ray_nodes import alive_nodes, lost_node_name
from megarl.errors import CheckpointError

logger = logging.getLogger(__name__)

# Timeout of all calls except ``write``. It includes the start of the actor's process.
_ANSWER_S = 60.0


class MemoryOfNodes:
    """``CheckpointMemory`` that is distributed over all nodes on which the run has ranks.

    Args:
        checkpoint_dir: directory of the checkpoints, on storage that all nodes share. The caller holds the
            run's lock.
        nodes: role -> Ray node id of each rank.
    """

    def __init__(self, checkpoint_dir: Path, nodes: Mapping[str, Sequence[str]]) -> None:
        self._nodes = nodes
        self._ranks = Counter(chain.from_iterable(nodes.values()))
        names = {node.node_id: node.name for node in alive_nodes()}
        self._names = {node: names.get(node, node) for node in self._ranks}
        self._places: dict[str, Path] = {}
        self._may_hold = False
        self._written: dict[str, int] = {}
        self._actors = {node: _actor_on(node, checkpoint_dir) for node in self._ranks}
        # Call the actors already now, so that their processes start during the first step.
        self._tidied = self._begin("tidy")

    def take(self, needed: int) -> bool:
        """Reserve empty directories in the shared memory of each node; see ``CheckpointMemory``. Return
        False, and reserve nothing, if a node has too little memory. The estimate for a node is what it wrote
        last, or at first its ranks' share of ``needed`` bytes."""
        refused = self._answers(self._tidied)[1] if self._tidied else {}
        self._tidied, self._may_hold = {}, True
        calls = {
            node: ray_calls.submit(actor.take, self._needed_on(node, needed))
            for node, actor in self._actors.items()
        }
        paths, failed = self._answers(calls)
        for node, reason in {**refused, **failed}.items():
            logger.warning("a checkpoint cannot wait in the memory of node %s: %s", self._names[node], reason)
        self._places = {node: Path(path) for node, path in paths.items() if path is not None}
        # If one node has too little memory, every rank writes to disk.
        if self._places.keys() == self._actors.keys():
            return True
        self.free()
        return False

    def directories(self, role: str) -> list[Path]:
        """Return the directory in shared memory for each rank of a role."""
        return [self._places[node] for node in self._nodes[role]]

    def hold(self) -> None:
        """Open the written files on each node, so that they outlive the workers; see ``CheckpointMemory``."""
        failed = self._answers(self._begin("hold"))[1]
        if failed:
            reasons = "; ".join(f"node {self._names[node]}: {reason}" for node, reason in failed.items())
            raise CheckpointError(f"the checkpoint that the ranks left in memory cannot be opened: {reasons}")

    def write(self, target: Path) -> WriteOfNodes:
        """Start the write to disk on each node; see ``CheckpointMemory``."""
        return WriteOfNodes(
            self,
            target,
            {node: ray_calls.submit(actor.write, str(target)) for node, actor in self._actors.items()},
        )

    def free(self) -> None:
        """Discard the checkpoint on each node; see ``CheckpointMemory``. An actor that does not reply is
        killed, together with its writing process, and restarted by Ray."""
        if not self._may_hold:
            return
        self._places, self._may_hold = {}, False
        calls = self._begin("free")
        failed = self._answers(calls)[1]
        for node, reason in failed.items():
            logger.warning("node %s does not free its memory of a checkpoint: %s", self._names[node], reason)
        # Kill only actors that have not replied. On the other nodes the call has failed, and their actors
        # serve the next checkpoint or have died.
        for node in failed:
            if not ray_calls.wait([calls[node]], num_returns=1, timeout=0)[0]:
                # Ray restarts the actor, so that the next checkpoint may wait there.
                _kill(self._actors[node], no_restart=False)

    def close(self) -> None:
        """Free the memory and kill the actors."""
        # When Ray has been shut down, the actors and their processes have ended with it.
        if not ray.is_initialized():
            return
        self.free()
        for actor in self._actors.values():
            _kill(actor, no_restart=True)

    def name_of(self, node: str) -> str:
        """Return the host name of a node, for messages."""
        return self._names[node]

    def note_written(self, files: Mapping[str, Mapping[str, Entry]]) -> None:
        """Record the bytes that each node has written, as the estimate for its next checkpoint.

        Args:
            files: node -> file name -> manifest entry.
        """
        self._may_hold = False
        self._written = {
            node: sum(entry["size"] for entry in of_node.values()) for node, of_node in files.items()
        }

    def _needed_on(self, node: str, needed: int) -> int:
        return self._written.get(node, -(-needed * self._ranks[node] // self._ranks.total()))

    def _begin(self, method: str) -> dict[str, ray.ObjectRef[Any]]:
        return {node: ray_calls.submit(getattr(actor, method)) for node, actor in self._actors.items()}

    def _answers(self, calls: Mapping[str, ray.ObjectRef[Any]]) -> tuple[dict[str, Any], dict[str, str]]:
        """Collect the results of calls, waiting up to 60 s.

        Returns:
            Node -> return value for calls that succeeded, and node -> reason for calls that failed or timed
                out.
        """
        ready, _ = ray_calls.wait(list(calls.values()), num_returns=len(calls), timeout=_ANSWER_S)
        values, failed = {}, {}
        for node, call in calls.items():
            try:
                if call in ready:
                    values[node] = ray_calls.get(call)
                else:
                    failed[node] = f"no answer within {_ANSWER_S:g} s"
            except RayError as error:
                failed[node] = reason_of(error, node)
        return values, failed


class WriteOfNodes:
    """A ``Write`` of a checkpoint from the shared memory of several nodes to disk.

    Args:
        memory: holds the checkpoint.
        target: checkpoint directory on disk.
        calls: node -> running call, which returns the manifest entries of the node's files.
    """

    def __init__(self, memory: MemoryOfNodes, target: Path, calls: Mapping[str, ray.ObjectRef[Any]]) -> None:
        self._memory, self._target, self._calls = memory, target, dict(calls)
        self._begun = time.monotonic()
        self._files: dict[str, dict[str, Entry]] = {}

    def has_ended(self) -> bool:
        """Return whether all nodes have finished, or one has failed."""
        ready, left = ray_calls.wait(list(self._calls.values()), num_returns=len(self._calls), timeout=0)
        return not left or any(map(_has_failed, ready))

    def wait(self, longest_s: float) -> float:
        """Wait for all nodes, write the manifest, and return the duration in seconds. If a node fails, the
        write on the other nodes is aborted.

        Args:
            longest_s: timeout in seconds.

        Raises:
            CheckpointError: a node failed or was too slow, or the files on disk do not match the nodes'
                reports.
        """
        end = time.monotonic() + longest_s
        pending = dict(self._calls)
        while pending:
            # Return from the wait as soon as one node is done, because a failure must abort the others at
            # once.
            ready, _ = ray_calls.wait(
                list(pending.values()), num_returns=1, timeout=max(end - time.monotonic(), 0.0)
            )
            if not ready:
                self.abort()
                late = f"{self._target} was not written within {longest_s:g} s by {self._named(pending)}"
                raise CheckpointError(f"{late}. Fix: use a faster disk, or a larger deadlines.save_s")
            for node, call in list(pending.items()):
                if call in ready:
                    self._files[node] = self._entries(node, pending.pop(node))
        self._write_manifest()
        self._memory.note_written(self._files)
        return time.monotonic() - self._begun

    def abort(self) -> None:
        """Abort the write on all nodes and discard the checkpoint in memory."""
        self._memory.free()

    def _entries(self, node: str, call: ray.ObjectRef[Any]) -> dict[str, Entry]:
        try:
            entries: dict[str, Entry] = ray_calls.get(call)
        except RayError as error:
            self.abort()
            raise CheckpointError(
                f"{self._target} could not be written by {self._named([node])}: {reason_of(error, node)}"
            ) from error
        return entries

    def _write_manifest(self) -> None:
        files: dict[str, Entry] = {}
        for node, entries in self._files.items():
            twice = sorted(files.keys() & entries.keys())
            if twice:
                raise CheckpointError(
                    f"{self._target}: {twice[0]} was written by {self._named([node])} and by another one"
                )
            files |= entries
        write_manifest(self._target, files)
        fsync_directory(self._target)
        # Each node has checked only its own files. Verifying all of them on the driver shows whether
        # ``checkpoint_dir`` is one shared directory.
        problems = verify(self._target, hashes=False)
        if problems:
            where = f"{self._target} differs here from what the nodes have written"
            raise CheckpointError(
                f"{where}: {'; '.join(problems[:3])}. Fix: give a checkpoint_dir that all nodes "
                "and the driver share"
            )

    def _named(self, nodes: Mapping[str, object] | Sequence[str]) -> str:
        return "node " + ", ".join(map(self._memory.name_of, nodes))


def reason_of(error: RayError, node: str) -> str:
    """Return a one-line reason why a call on a node failed."""
    if isinstance(error, RayTaskError):
        return str(error.cause)
    if lost_node_name(node) is not None:
        return "the node is lost"
    if isinstance(error, RayActorError):
        return "its process there died"
    return str(error).splitlines()[0]


def _actor_on(node: str, checkpoint_dir: Path) -> Any:
    place = NodeAffinitySchedulingStrategy(node_id=node, soft=False)
    # Restart an actor that dies, so that it can take the next checkpoint. Several concurrent calls let
    # ``free`` run during a ``write``, even one that hangs.
    actor = ray.remote(NodeMemory).options(
        num_cpus=0, max_restarts=-1, max_concurrency=4, scheduling_strategy=place
    )
    return ray_calls.submit(actor, str(checkpoint_dir), node)


def _has_failed(call: ray.ObjectRef[Any]) -> bool:
    try:
        ray_calls.get(call)
    except RayError:
        return True
    return False


def _kill(actor: Any, no_restart: bool) -> None:
    try:
        ray_calls.kill(actor, no_restart=no_restart)
    except (RayError, ValueError, RuntimeError) as error:
        logger.warning("a process that holds memory of checkpoints cannot be ended: %s", error)
