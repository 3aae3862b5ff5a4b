"""Checkpoints that wait in the shared memory of several nodes, each rank's part on its own node, while
training
continues.

On each node an actor holds the memory and the process that writes (``megarl.checkpoint.node_memory``). It is
not one of the workers, so their files are written to disk even if the workers are lost after ``hold``. When
all nodes have finished, the manifest is written here, from their reports.
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

# A node may take this time to start, and for every call but ``write``.
_ANSWER_S = 60.0


class MemoryOfNodes:
    """``CheckpointMemory`` over all nodes of a run's ranks.

    Args:
        checkpoint_dir: directory of the checkpoints, which all nodes see. The caller holds the run's lock.
        nodes: Ray's id of the node of each rank, by role.
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
        # Start this now, next to the first step, because the processes of the actors have to start.
        self._tidied = self._begin("tidy")

    def take(self, needed: int) -> bool:
        """Make empty directories on each node, see ``CheckpointMemory``. A node needs room for as much as it
        wrote last, or for the share of its ranks."""
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
        # Use all nodes or none: if one node has no room, every rank writes to disk at once.
        if self._places.keys() == self._actors.keys():
            return True
        self.free()
        return False

    def directories(self, role: str) -> list[Path]:
        """Return one directory for each rank, see ``CheckpointMemory``."""
        return [self._places[node] for node in self._nodes[role]]

    def hold(self) -> None:
        """Open the files on each node, see ``CheckpointMemory``."""
        failed = self._answers(self._begin("hold"))[1]
        if failed:
            reasons = "; ".join(f"node {self._names[node]}: {reason}" for node, reason in failed.items())
            raise CheckpointError(f"the checkpoint that the ranks left in memory cannot be opened: {reasons}")

    def write(self, target: Path) -> WriteOfNodes:
        """Begin to write on each node, see ``CheckpointMemory``."""
        return WriteOfNodes(
            self,
            target,
            {node: ray_calls.submit(actor.write, str(target)) for node, actor in self._actors.items()},
        )

    def free(self) -> None:
        """Discard the memory of each node, see ``CheckpointMemory``. An actor that does not reply is killed
        with its writing process; if an actor is gone, so is its process."""
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
            if not _has_answered(calls[node]):
                # Ray restarts the actor, so that the next checkpoint may wait there.
                _kill(self._actors[node], no_restart=False)

    def close(self) -> None:
        """Free everything, and end the actors."""
        # Without Ray the actors have ended, and their processes with them.
        if not ray.is_initialized():
            return
        self.free()
        for actor in self._actors.values():
            _kill(actor, no_restart=True)

    def name_of(self, node: str) -> str:
        """Return the name of a node, for messages."""
        return self._names[node]

    def note_written(self, files: Mapping[str, Mapping[str, Entry]]) -> None:
        """Record how much each node has written, which is the estimate for its next checkpoint."""
        self._may_hold = False
        self._written = {
            node: sum(entry["size"] for entry in of_node.values()) for node, of_node in files.items()
        }

    def _needed_on(self, node: str, needed: int) -> int:
        return self._written.get(node, -(-needed * self._ranks[node] // self._ranks.total()))

    def _begin(self, method: str) -> dict[str, ray.ObjectRef[Any]]:
        return {node: ray_calls.submit(getattr(actor, method)) for node, actor in self._actors.items()}

    def _answers(self, calls: Mapping[str, ray.ObjectRef[Any]]) -> tuple[dict[str, Any], dict[str, str]]:
        """Return by node the results of calls that return in time, and the reasons why the others do not."""
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
    """``Write`` of a checkpoint from the memory of several nodes.

    Args:
        memory: the memory that the checkpoint waits in.
        target: directory on disk.
        calls: by node, the call that will return the entries of its files.
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
        """Wait for all nodes, see ``Write``. The first node that fails ends the others too."""
        end = time.monotonic() + longest_s
        pending = dict(self._calls)
        while pending:
            # Wait for one node at a time, because the first one that fails ends the others.
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
        """End the write on all nodes, see ``Write``."""
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
        # Verify the files here, because each node has seen only its own: this shows whether all wrote to one
        # directory.
        problems = verify(self._target, hashes=False)
        if problems:
            where = f"{self._target} differs here from what the nodes have written"
            raise CheckpointError(
                f"{where}: {'; '.join(problems[:3])}. Fix: give a checkpoint_dir that all nodes "
                "and the driver share"
            )

    def _named(self, nodes: Mapping[str, Any] | Sequence[str]) -> str:
        return "node " + ", ".join(map(self._memory.name_of, nodes))


def reason_of(error: RayError, node: str) -> str:
    """Return why a call on a node failed, in one line."""
    if isinstance(error, RayTaskError):
        return str(error.cause)
    if lost_node_name(node) is not None:
        return "the node is lost"
    if isinstance(error, RayActorError):
        return "its process there died"
    return str(error).splitlines()[0]


def _actor_on(node: str, checkpoint_dir: Path) -> Any:
    place = NodeAffinitySchedulingStrategy(node_id=node, soft=False)
    # Restart an actor that dies, for the next checkpoint. Allow concurrent calls, so that ``free`` also works
    # during a ``write``, even one that hangs.
    options: dict[str, Any] = {
        "num_cpus": 0,
        "max_restarts": -1,
        "max_concurrency": 4,
        "scheduling_strategy": place,
    }
    return ray_calls.submit(ray.remote(NodeMemory).options(**options), str(checkpoint_dir), node)


def _has_answered(call: ray.ObjectRef[Any]) -> bool:
    return bool(ray_calls.wait([call], num_returns=1, timeout=0)[0])


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
