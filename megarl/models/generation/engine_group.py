"""The driver's interface to rollout engines that run as workers of a cluster. It distributes prompts,
collects responses, and prevents generation with outdated weights."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from megarl.config.generation import GenerationConfig
from megarl.distributed.batch_checks import check_batch
from megarl.distributed.batched_data_dict import BatchedDataDict
from megarl.distributed.virtual_cluster import RayVirtualCluster
from megarl.distributed.worker_groups import RayWorkerGroup
from megarl.errors import BatchError, ConfigError, MegarlError, RefitError, WorkerError
from megarl.models.generation.engine_stream import EngineStream
from megarl.models.generation.engines import SharesDevices, started_on_empty_devices
from megarl.models.generation.interfaces import (
    GENERATION_INPUTS,
    GenerationDatumSpec,
    GenerationOutputSpec,
    RolloutEngine,
    Sampling,
)
from megarl.models.generation.sampling import seeds_of_call
from megarl.models.generation.stopping import stop_strings_of_rows
from megarl.models.generation.stream import RequestStream
from megarl.weight_sync.mailbox import CarriedPayload, MailboxHandle
from megarl.weight_sync.manifest import Description, Manifest
from megarl.weight_sync.slices import WantedSlices, slices_digest

if TYPE_CHECKING:
    import ray

logger = logging.getLogger(__name__)

NODE = "node"
"""Axis of the worker group over the nodes of one engine; there is one worker on each node."""
LIFE_SECONDS = 60.0
"""Time limit in seconds for an engine's reply to ``is_alive``, counted from the end of its current call."""


@dataclass(frozen=True, slots=True)
class EngineWorkers:
    """A description of the workers of a group of engines, and the function that starts them.

    Attributes:
        make: starts the workers. The worker group must have the axes ``data_parallel``, with one index per
            engine, and ``NODE``.
        engines: number of engines.
        ranks: number of ranks per engine.
        nodes: number of nodes per engine, with one worker on each. Only the first worker is called.
        init_timeout_s: time limit in seconds for their start.
    """

    make: Callable[[], RayWorkerGroup]
    engines: int
    ranks: int
    nodes: int
    init_timeout_s: float


class EngineGroup(RolloutEngine):
    """A group of rollout engines that run as workers of a cluster.

    Workers must have these methods: ``generate``, ``prepare_for_generation``, ``finish_generation``,
    ``is_alive`` and ``shutdown``; ``connect``, ``meet``, ``slices_read``, ``take_slices`` and
    ``update_from_{handles,policy,broadcast}``; for engines over several nodes also ``meeting_place`` and
    ``join``.

    Args:
        workers: how to start the workers.
        config: the generation configuration, with defaults filled in.
        vocab_size: vocabulary size of the model.
        longest: maximum number of tokens of prompt and response together.
        longest_key: dotted key that sets ``longest``, for messages.
        seed: gives the sampling seeds of batches without ``sampling_seeds``.

    Attributes:
        expected_version: version of the weights of the last refit. An engine must have this version to
            generate; None before the first refit.

    Raises:
        MegarlError: an engine could not be started; those already started are shut down.
    """

    def __init__(
        self,
        workers: EngineWorkers,
        config: GenerationConfig,
        *,
        vocab_size: int,
        longest: int,
        longest_key: str,
        seed: int = 0,
    ) -> None:
        self.cfg = config
        self._workers = workers
        self._vocab_size, self._longest, self._longest_key = vocab_size, longest, longest_key
        self.expected_version: int | None = None
        self._connected = False
        # Version of each engine's weights. It is None during a refit and after a failed call, so that no
        # engine generates with partially loaded weights.
        self._versions: list[int | None] = [None] * workers.engines
        self._weights: list[list[Any]] = []
        self._met: tuple[Mapping[str, MailboxHandle], int] | None = None
        self._wanted: WantedSlices | None = None
        self._sliced: Sequence[str] = ()
        self._seed, self._calls = seed, 0
        self._receiving: list[ray.ObjectRef[Any]] = []
        self._colocated = bool(config["colocated"]["enabled"])
        self.worker_group = self._start()

    def _start(self) -> RayWorkerGroup:
        """Start all engines. If an engine has several nodes, let its workers connect to each other."""
        group = self._workers.make()
        if self._workers.nodes > 1:
            try:
                found = group.run_all_workers_single_data("meeting_place", run_rank_0_only_axes=[NODE])
                addresses = group.get_all_worker_results(found, timeout_s=self._workers.init_timeout_s)
                joined = group.run_all_workers_multiple_data(
                    "join",
                    node=[*range(self._workers.nodes)] * len(addresses),
                    address=[address for address in addresses for _ in range(self._workers.nodes)],
                )
                group.get_all_worker_results(joined, timeout_s=self._workers.init_timeout_s)
            except BaseException:
                # Shut down by force: workers that wait for the other nodes do not reply to a shutdown
                # request.
                group.shutdown(force=True)
                raise
        return group

    @property
    def version(self) -> int | None:
        """Version of the weights on all engines; None if some engine does not have those of the last
        refit."""
        return self.expected_version if set(self._versions) == {self.expected_version} else None

    def restart(self, policy: SharesDevices | None = None) -> None:
        """Replace all engines by new ones, for example after an engine has died or hangs. The new engines
        reject generation until a complete refit.

        Engines on their own devices also need a new process group before that refit: call ``init_collective``
        on the policy and on the engines.

        Args:
            policy: a policy on the same devices. As at the first start, it is offloaded while the engines
                start. Afterwards its parameters are back on the devices, and the engines sleep. If it is
                None, nothing is offloaded, so the start may fail for lack of GPU memory.

        Raises:
            MegarlError: an engine could not be started; those already started are shut down.
        """
        self._forget()
        self._met, self._wanted, self._sliced = None, None, ()
        self.disconnect()
        self.shutdown()
        started_on_empty_devices(policy if self._colocated else None, self._started_anew)

    def is_alive(self) -> bool:
        """Return whether all engine processes run, and none hangs in a call that was aborted."""
        try:
            answers = self.worker_group.run_all_workers_single_data("is_alive")
            return all(self.worker_group.get_all_worker_results(answers, timeout_s=LIFE_SECONDS))
        except MegarlError:
            return False

    def _started_anew(self) -> EngineGroup:
        self.worker_group = self._start()
        if self._weights and self._colocated:
            self._all("connect", weights=self._weights, address=None)
        return self

    @property
    def ranks(self) -> int:
        """Total number of ranks of all engines."""
        return self._workers.engines * self._workers.ranks

    @property
    def connected(self) -> bool:
        """True if ``init_collective`` was called since the engines were started."""
        return self._connected

    def disconnect(self) -> None:
        """Mark the engines as not connected to the policy's process group."""
        self._connected = False

    def results(self, futures: list[ray.ObjectRef[Any]]) -> list[Any]:
        """Wait for the futures of this object's methods, and return their results."""
        return self._results(futures)

    # Methods for a refit.

    def prepare_refit_info(self, state_dict_info: Description) -> None:
        """Store names, shapes and dtypes of the weights that refits will send, from the policy's
        ``prepare_refit_info``. Engines on the policy's devices are then ready for a refit.

        Raises:
            RefitError: the argument is not such a description.
        """
        tensors = Manifest.from_description(state_dict_info).tensors
        self._weights = [
            [tensor.name, list(tensor.shape), str(tensor.dtype).removeprefix("torch.")] for tensor in tensors
        ]
        self._forget()
        self._met, self._wanted, self._sliced = None, None, ()
        self.expected_version = None
        if self._colocated:
            self._all("connect", weights=self._weights, address=None)

    def meet(self, mailboxes: Mapping[str, MailboxHandle]) -> int:
        """Connect each engine rank to the mailbox of the policy rank on its device; see
        ``RolloutEngine.meet``.

        Raises:
            RefitError: there is no policy rank on the device of an engine rank.
        """
        if self._met is None or self._met[0] != mailboxes:
            # A new session id for each connection, so that messages of earlier engines are not mistaken for
            # those of the current ones.
            session = secrets.randbits(62)
            self._all("meet", mailboxes=mailboxes, session=session)
            self._met = mailboxes, session
        return self._met[1]

    def slices_wanted(self) -> WantedSlices | None:
        """Return the slices of the weights that the engine ranks read, as recorded from their weight loaders.
        None for engines of one rank, which read full weights. The engines are called only once."""
        if self._workers.ranks == 1:
            return None
        if self._wanted is None:
            # Request digests first: hundreds of engines with thousands of experts would each send the same
            # megabytes.
            engines = self._all("slices_read", as_digest=True)
            [first] = self._results([self.worker_group.run_single_worker_single_data("slices_read", 0)])
            ranks = tuple(slices for _, slices in first)
            # All engines must read the same slices: one sends its slices, the others a digest of theirs.
            digests, alike = list(map(slices_digest, ranks)), True
            devices = {}
            for engine in engines:
                for rank, (device, digest) in enumerate(engine):
                    devices[device] = rank
                    alike = alike and digest == digests[rank]
            if not alike:
                logger.warning(
                    "engines of one model read different slices of its weights, so they get full weights"
                )
                # An empty mapping means that the rank reads full weights.
                ranks = ({},) * self._workers.ranks
            self._wanted = WantedSlices(ranks, devices)
        return self._wanted if any(self._wanted.ranks) else None

    def take_slices(self, names: Sequence[str]) -> None:
        """Make the engines expect slices of the weights ``names`` in later refits."""
        if tuple(names) != tuple(self._sliced):
            # The policy creates new mailboxes for slices, so the engines must connect to them again.
            self._met = None
            self._all("take_slices", names=list(names))
            self._sliced = tuple(names)

    def init_collective(self, ip: str, port: int, world_size: int) -> list[ray.ObjectRef[Any]]:
        """Join the policy's process group; see ``GenerationInterface.init_collective``.

        Raises:
            RefitError: ``prepare_refit_info`` was not called, or ``world_size`` is not the number of engine
                ranks plus one.
        """
        if not self._weights:
            raise RefitError(
                "init_collective(): the engines do not know the weights yet; call prepare_refit_info() first"
            )
        right = self.ranks + 1
        if world_size != right:
            raise RefitError(
                f"world_size = {world_size}: {self._workers.engines} engines of {self._workers.ranks} ranks "
                f"and the policy make {right}"
            )
        self._forget()
        self._connected = True
        addresses = [
            # Rank 0 is the policy. The engines' ranks follow, engine by engine.
            [ip, port, world_size, 1 + engine * self._workers.ranks]
            for engine in range(self._workers.engines)
        ]
        known = {"weights": self._weights}
        return self.worker_group.run_all_workers_multiple_data(
            "connect", run_rank_0_only_axes=[NODE], address=addresses, common_kwargs=known
        )

    def update_weights_from_ipc_handles(self, ipc_handles: dict[str, CarriedPayload]) -> bool:
        """Load one group of weights into all engines, and return True. No engine generates until the last
        group of the refit is loaded.

        Raises:
            RefitError, WorkerError: an engine could not load the weights. Engines reject generation until a
                complete refit.
        """
        self._forget()
        if not ipc_handles:
            raise RefitError(
                "no handles of weights: pass on what the policy's get_weights_ipc_handles() returned"
            )
        self.expected_version = next(iter(ipc_handles.values()))["version"]
        # Engines return None as their version until they have loaded the last group.
        self._versions = self._all("update_from_handles", handles=ipc_handles)
        return True

    def update_weights_from_policy(self, ticket: int) -> list[ray.ObjectRef[Any]]:
        """Receive all weights of a refit from the policy ranks on the same devices. Await the returned
        futures after the policy's futures."""
        self._forget()
        self.expected_version = None
        self._receiving = self._call("update_from_policy", ticket=ticket)
        return self._receiving

    def update_weights_from_collective(self, version: int | None = None) -> list[ray.ObjectRef[Any]]:
        """Receive all weights of a refit from the policy's process group. Await the returned futures together
        with the policy's futures.

        Args:
            version: required version of the weights; None accepts any.
        """
        self._forget()
        self.expected_version = version
        self._receiving = self._call("update_from_broadcast", version=version)
        return self._receiving

    def loaded(self, versions: list[int | None]) -> None:
        """Store the versions that the futures of ``update_weights_from_*`` returned. If this is not called,
        the next generation awaits the futures itself."""
        self._receiving = []
        self._versions = list(versions)
        if self.expected_version is None:
            self.expected_version = next((version for version in versions if version is not None), None)

    def _forget(self) -> None:
        """Mark all engines as having no complete weights."""
        self._receiving = []
        self._versions = [None] * self._workers.engines

    def _require_weights(self) -> None:
        """Check that all engines have the weights of the last refit.

        Raises:
            RefitError: an engine does not have them.
        """
        if self._receiving:
            receiving, self._receiving = self._receiving, []
            self.loaded(self.results(receiving))
        if self.expected_version is None:
            raise RefitError("the engines have no complete weights: refit them before they generate")
        for engine, version in enumerate(self._versions):
            if version != self.expected_version:
                has = "no complete weights" if version is None else f"the weights of version {version}"
                raise RefitError(
                    f"engine {engine} of {self._workers.engines} has {has}, but version "
                    f"{self.expected_version} was sent last: refit all engines before they generate"
                )

    # Methods that generate.

    def generate(
        self,
        data: BatchedDataDict[GenerationDatumSpec],
        greedy: bool = False,
        *,
        sampling: Sampling | None = None,
    ) -> BatchedDataDict[GenerationOutputSpec]:
        """Generate a response to every prompt. Rows keep their order. In addition to NeMo-RL's columns, the
        result contains ``truncated`` [B] bool.

        Raises:
            BatchError: the prompts are invalid.
            RefitError: an engine does not have the weights of the last refit.
            WorkerError: an engine died; ``restart`` starts new ones.
        """
        if not isinstance(data, BatchedDataDict):
            raise BatchError(
                f"data must be a BatchedDataDict, got {type(data).__name__}: wrap the dictionary in "
                "BatchedDataDict(...)"
            )
        needed = data.select_columns(GENERATION_INPUTS)
        self._check(needed)
        self._require_weights()
        if "sampling_seeds" not in needed:
            needed["sampling_seeds"] = seeds_of_call(self._seed, self._calls, data.size)
        future = self.worker_group.run_all_workers_sharded_data(
            "generate",
            data=needed.deal(self._workers.engines, allow_uneven_shards=True),
            in_sharded_axes=["data_parallel"],
            common_kwargs={"greedy": greedy, "version": self.expected_version, "sampling": sampling},
        )
        results = self._results(future)
        # Count only successful calls: a retry after a restart of the engines then uses the seeds of the
        # failed call and samples the same.
        self._calls += 1
        return BatchedDataDict.from_batches(results, pad_value_dict={"output_ids": self.cfg["pad_token_id"]})

    def _check(self, data: BatchedDataDict[Any]) -> None:
        """Raise BatchError for prompts that would make an engine fail, because it would have to be
        restarted."""
        check_batch(
            data,
            required=(),
            vocab_size=self._vocab_size,
            max_length=self._longest,
            max_length_key=self._longest_key,
        )
        stop_strings_of_rows(self.cfg["stop_strings"], data.get("stop_strings"), data.size)

    def score(self, data: BatchedDataDict[Any]) -> list[torch.Tensor] | None:
        """Return log-probabilities of given tokens; see ``RolloutEngine.score``.

        Returns None if workers have no method ``score``, or if temperature, top-p or top-k change the
        distribution, because engines score the unchanged one.
        """
        plain = self.cfg["temperature"] == 1 and self.cfg["top_p"] == 1 and self.cfg["top_k"] is None
        if not plain or not self.scores:
            return None
        self._require_weights()
        needed = data.select_columns(("input_ids", "input_lengths"))
        return [found["logprobs"] for found in self._all("score", data=needed, version=self.expected_version)]

    @property
    def scores(self) -> bool:
        """True if workers have the method ``score``. Subclasses override this."""
        return False

    def requests(
        self,
        stop_token_ids: Iterable[int],
        pad_token_id: int,
        *,
        greedy: bool,
        sampling: Sampling | None,
        gathers: bool = False,
    ) -> RequestStream:
        """Return a stream of requests. If workers have the method ``exchange``, an engine accepts further
        requests while it completes others.

        Args:
            stop_token_ids, pad_token_id, greedy, sampling: see ``RolloutEngine.requests``.
            gathers: see ``EngineStream``; ignored if workers have no ``exchange``.
        """
        if not self.takes_requests:
            return super().requests(stop_token_ids, pad_token_id, greedy=greedy, sampling=sampling)
        self._require_weights()
        options = {"greedy": greedy, "version": self.expected_version, "sampling": sampling}
        return EngineStream(self, self._check, pad_token_id, options, gathers=gathers)

    @property
    def takes_requests(self) -> bool:
        """True if workers have the method ``exchange``. Subclasses override this."""
        return False

    @property
    def engines(self) -> int:
        """Number of engines."""
        return self._workers.engines

    def call_engine(self, method: str, engine: int, **options: Any) -> ray.ObjectRef[Any]:
        """Call a method of one engine's first worker, and return the future."""
        return self.worker_group.run_single_worker_single_data(
            method, self.worker_group.get_dp_leader_worker_idx(engine), **options
        )

    def prepare_for_generation(self, *args: Any, **kwargs: Any) -> bool:
        """Allocate device memory again after ``finish_generation``. ``tags`` selects which: ``["weights"]``
        before a refit, ``["kv_cache"]`` after it; by default both."""
        self._all("prepare_for_generation", tags=kwargs.get("tags"))
        return True

    def finish_generation(self, *args: Any, **kwargs: Any) -> bool:
        """Free device memory for the policy. On a shared GPU the weights are discarded too, so a refit must
        follow before the next generation."""
        # An engine returns False if its weights were discarded.
        if not all(self._all("finish_generation")):
            self._forget()
        return True

    def shutdown(self) -> bool:
        """Shut down the engines. Return True if all of them exited cleanly. Further calls are allowed."""
        try:
            return self.worker_group.shutdown(cleanup_method="shutdown")
        except Exception:
            logger.exception("shutting the engines' workers down failed")
            return False

    def _all(self, method: str, **options: Any) -> list[Any]:
        return self._results(self._call(method, **options))

    def _call(self, method: str, **options: Any) -> list[ray.ObjectRef[Any]]:
        """Call a method of each engine's first worker, and return the futures."""
        return self.worker_group.run_all_workers_single_data(method, run_rank_0_only_axes=[NODE], **options)

    def _results(self, futures: Any) -> list[Any]:
        try:
            return self.worker_group.get_all_worker_results(futures)
        except WorkerError as error:
            # The state of an engine's weights is unknown after such an error.
            self._forget()
            raise type(error)(
                f"{error}\nFix: start new engines with {type(self).__name__}.restart(policy), and refit them"
            ) from error


def engine_places(cluster: RayVirtualCluster, ranks: int, key: str) -> list[list[tuple[int, list[int]]]]:
    """Assign bundles to engines. Return, for each engine and each of its nodes, the placement group and the
    first bundle.

    An engine has tensor parallel times pipeline parallel ranks. If every node's bundles can be divided into
    engines, each engine is on one node. Otherwise each engine fills complete, adjacent nodes.

    Args:
        cluster: provides the bundles.
        ranks: number of ranks of an engine.
        key: dotted key of the section with the engine's parallel sizes, for messages.

    Raises:
        ConfigError: the bundles cannot be divided into engines in either way.
    """
    counts = [len(group.bundle_specs) for group in cluster.get_placement_groups()]
    if not any(count % ranks for count in counts):
        return [[(node, [first])] for node, count in enumerate(counts) for first in range(0, count, ranks)]
    nodes, rest = divmod(ranks, counts[0])
    if rest or len(set(counts)) > 1 or len(counts) % nodes:
        node = next(node for node, count in enumerate(counts) if count % ranks)
        raise ConfigError(
            f"{key}: tensor_parallel_size times pipeline_parallel_size = {ranks}: it does not "
            f"divide the {counts[node]} bundles of the engines on node {node}, and does not fill "
            f"complete nodes of {counts} bundles. Fix: write sizes whose product does, or give "
            "another number of bundles"
        )
    return [[(node, [0]) for node in range(first, first + nodes)] for first in range(0, len(counts), nodes)]
