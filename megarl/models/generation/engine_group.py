"""EngineGroup: engines that are workers of a cluster, as the driver sees them. It deals prompts out, collects answers, and lets no engine
answer with old weights."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from megarl.config.generation import GenerationConfig
from megarl.distributed.batch_checks import check_batch
from megarl.distributed.batched_data_dict import BatchedDataDict
from megarl.distributed.virtual_cluster import RayVirtualCluster
from megarl.distributed.worker_groups import RayWorkerGroup
from megarl.errors import BatchError, ConfigError, MegarlError, RefitError, WorkerError
from megarl.models.generation.engine_stream import EngineStream
from megarl.models.generation.engines import SharesDevices, started_on_empty_devices
from megarl.models.generation.interfaces import GENERATION_INPUTS, GenerationDatumSpec, GenerationOutputSpec, RolloutEngine, Sampling
from megarl.models.generation.stopping import stop_strings_of_rows
from megarl.models.generation.stream import RequestStream
from megarl.weight_sync.manifest import Manifest
from megarl.weight_sync.slices import WantedSlices, slices_digest

if TYPE_CHECKING:
    import ray

logger = logging.getLogger(__name__)

NODE = "node"
"""Axis of the workers of one engine, one on each of its nodes."""
LIFE_SECONDS = 60.0
"""That an engine may take to say that it lives, behind a call that it was in."""


@dataclass(frozen=True, slots=True)
class EngineWorkers:
    """The workers of some engines. The first worker of an engine speaks for it.

    Attributes:
        make: starts them. The group has the axes ``data_parallel``, one place an engine, and ``NODE``.
        engines: how many there are.
        ranks: of one engine.
        nodes: that one engine is on, with a worker on each.
        init_timeout_s: seconds that their start may take.
    """

    make: Callable[[], RayWorkerGroup]
    engines: int
    ranks: int
    nodes: int
    init_timeout_s: float


class EngineGroup(RolloutEngine):
    """Engines that are workers of a cluster.

    A worker has the methods that are called here: ``generate``, ``prepare_for_generation``, ``finish_generation``, ``is_alive`` and
    ``shutdown``; ``connect``, ``meet``, ``slices_read``, ``take_slices`` and ``update_from_{handles,policy,broadcast}``; over several nodes
    ``meeting_place`` and ``join``.

    Args:
        workers: of the engines.
        config: the generation configuration, complete.
        vocab_size: tokens of the model.
        longest: most tokens of prompt and answer together.
        longest_key: dotted key that says so, for messages.
        seed: where a batch brings no sampling seeds.

    Attributes:
        expected_version: of the weights that were sent last, and that an engine must have to answer; None before the first refit.

    Raises:
        MegarlError: an engine could not be made; none is left behind.
    """

    def __init__(
        self, workers: EngineWorkers, config: GenerationConfig, *, vocab_size: int, longest: int, longest_key: str, seed: int = 0
    ) -> None:
        self.cfg = config
        self._workers = workers
        self._vocab_size, self._longest, self._longest_key = vocab_size, longest, longest_key
        self.expected_version: int | None = None
        self._connected = False
        self._versions: list[int | None] = [None] * workers.engines
        self._weights: list[list[Any]] = []
        self._met: tuple[Mapping[str, Any], int] | None = None
        self._wanted: WantedSlices | None = None
        self._sliced: Sequence[str] = ()
        self._seed, self._calls = seed, 0
        self._receiving: list[ray.ObjectRef[Any]] = []
        self._colocated = bool(config["colocated"]["enabled"])
        self.worker_group = self._start()

    def _start(self) -> RayWorkerGroup:
        """Start all engines."""
        group = self._workers.make()
        if self._workers.nodes > 1:
            try:
                found = group.run_all_workers_single_data("meeting_place", run_rank_0_only_axes=[NODE])
                addresses = group.get_all_worker_results(found, timeout_s=self._workers.init_timeout_s)
                joined = group.run_all_workers_multiple_data(
                    "join",
                    node=[node for _ in addresses for node in range(self._workers.nodes)],
                    address=[address for address in addresses for _ in range(self._workers.nodes)],
                )
                group.get_all_worker_results(joined, timeout_s=self._workers.init_timeout_s)
            except BaseException:
                group.shutdown(force=True)
                raise
        return group

    @property
    def version(self) -> int | None:
        """Version of the weights that all engines have; None when one of them has others than were sent last, or none."""
        return self.expected_version if set(self._versions) == {self.expected_version} else None

    def restart(self, policy: SharesDevices | None = None) -> None:
        """Start new engines in place of all present ones, after one has died or hangs. They are refused until a whole refit.

        Engines apart from the policy need a new group before: ``init_collective`` of both sides.

        Args:
            policy: on the same devices, which it leaves meanwhile, as at the first start; its parameters are back afterwards, and the
                engines sleep. Without it engines start beside whatever is on the devices, which on a GPU is refused where it is too much.

        Raises:
            MegarlError: an engine could not be made; none is left behind.
        """
        self._forget()
        self._met, self._wanted, self._sliced = None, None, ()
        self.disconnect()
        self.shutdown()
        started_on_empty_devices(policy if self._colocated else None, self._started_anew)

    def is_alive(self) -> bool:
        """Whether no process of an engine has ended, and none hangs in a call that was given up."""
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
        """Ranks of all engines."""
        return self._workers.engines * self._workers.ranks

    @property
    def connected(self) -> bool:
        """Whether ``init_collective`` was called for the present engines."""
        return self._connected

    def disconnect(self) -> None:
        """Forget the policy's group."""
        self._connected = False

    def results(self, futures: list[ray.ObjectRef[Any]]) -> list[Any]:
        """Wait for futures of this object's methods."""
        return self._results(futures)

    # refit

    def prepare_refit_info(self, state_dict_info: dict[str, Any]) -> None:
        """Learn the weights that will arrive, from the policy's ``prepare_refit_info``; engines on its devices are ready afterwards.

        Raises:
            RefitError: it is something else.
        """
        tensors = Manifest.from_description(state_dict_info).tensors
        self._weights = [[tensor.name, list(tensor.shape), str(tensor.dtype).removeprefix("torch.")] for tensor in tensors]
        self._forget()
        self._met, self._wanted, self._sliced = None, None, ()
        self.expected_version = None
        if self._colocated:
            self._all("connect", weights=self._weights, address=None)

    def meet(self, mailboxes: Mapping[str, Any]) -> int:
        """Have each engine rank find the policy's rank on its device; see ``RolloutEngine.meet``.

        Raises:
            RefitError: an engine rank shares its device with no rank of the policy.
        """
        if self._met is None or self._met[0] != mailboxes:
            session = secrets.randbits(62)
            self._all("meet", mailboxes=mailboxes, session=session)
            self._met = mailboxes, session
        return self._met[1]

    def slices_wanted(self) -> WantedSlices | None:
        """What the ranks of the engines read, as their loaders were seen to do; None for engines of one rank, which read all. Asked of the
        engines once."""
        if self._workers.ranks == 1:
            return None
        if self._wanted is None:
            # hundreds of engines of thousands of experts would each say the same in megabytes
            engines = self._all("slices_read", as_digest=True)
            [first] = self._results([self.worker_group.run_single_worker_single_data("slices_read", 0)])
            ranks = tuple(slices for _, slices in first)
            digests = [slices_digest(slices) for slices in ranks]
            if any([digest for _, digest in engine] != digests for engine in engines):
                logger.warning("engines of one model read different slices of its weights, and get whole ones")
                ranks = ({},) * self._workers.ranks
            devices = {device: rank for engine in engines for rank, (device, _) in enumerate(engine)}
            self._wanted = WantedSlices(ranks, devices)
        return self._wanted if any(self._wanted.ranks) else None

    def take_slices(self, names: Sequence[str]) -> None:
        """Have the engines take these weights as slices from now on."""
        if tuple(names) != tuple(self._sliced):
            self._met = None
            self._all("take_slices", names=list(names))
            self._sliced = tuple(names)

    def init_collective(self, ip: str, port: int, world_size: int) -> list[ray.ObjectRef[Any]]:
        """Join the policy's group; see ``GenerationInterface.init_collective``.

        Raises:
            RefitError: ``prepare_refit_info`` was not called, or ``world_size`` is not that of the engines and one.
        """
        if not self._weights:
            raise RefitError("init_collective(): the engines do not know the weights yet; call prepare_refit_info() first")
        right = self.ranks + 1
        if world_size != right:
            raise RefitError(
                f"world_size = {world_size}: {self._workers.engines} engines of {self._workers.ranks} ranks and the policy make {right}"
            )
        self._forget()
        self._connected = True
        addresses = [[ip, port, world_size, 1 + engine * self._workers.ranks] for engine in range(self._workers.engines)]
        known = {"weights": self._weights}
        return self.worker_group.run_all_workers_multiple_data(
            "connect", run_rank_0_only_axes=[NODE], address=addresses, common_kwargs=known
        )

    def update_weights_from_ipc_handles(self, ipc_handles: dict[str, Any]) -> bool:
        """Load one group of weights into all engines.

        Returns:
            True. What fails raises.

        Raises:
            RefitError, WorkerError: an engine could not take them; none answers until a whole refit.
        """
        self._forget()
        if not ipc_handles:
            raise RefitError("no handles of weights: pass on what the policy's get_weights_ipc_handles() returned")
        self.expected_version = int(next(iter(ipc_handles.values()))["version"])
        self._versions = self._all("update_from_handles", handles=ipc_handles)
        return True

    def update_weights_from_policy(self, ticket: int) -> list[ray.ObjectRef[Any]]:
        """Take all weights of a refit from the policy's ranks on the same devices; await the futures after the policy's."""
        self._forget()
        self.expected_version = None
        self._receiving = self._call("update_from_policy", ticket=ticket)
        return self._receiving

    def update_weights_from_collective(self, version: int | None = None) -> list[ray.ObjectRef[Any]]:
        """Take all weights from the policy's group; await the futures with the policy's.

        Args:
            version: of the weights that have to come; by default any, as the policy says.
        """
        self._forget()
        self.expected_version = version
        self._receiving = self._call("update_from_broadcast", version=version)
        return self._receiving

    def loaded(self, versions: list[int | None]) -> None:
        """Return what the futures of ``update_weights_from_*`` gave; asked for before the next answer where nobody calls this."""
        self._receiving = []
        self._versions = list(versions)
        if self.expected_version is None:
            self.expected_version = next((version for version in versions if version is not None), None)

    def _forget(self) -> None:
        """No engine has whole weights any more, as far as is known."""
        self._receiving = []
        self._versions = [None] * self._workers.engines

    def _require_weights(self) -> None:
        """That all engines have what was sent last.

        Raises:
            RefitError: one of them has not.
        """
        if self._receiving:
            receiving, self._receiving = self._receiving, []
            self.loaded(self.results(receiving))
        if self.expected_version is None:
            raise RefitError("the engines have no whole weights: refit them before they answer")
        for engine, version in enumerate(self._versions):
            if version != self.expected_version:
                has = "no whole weights" if version is None else f"the weights of version {version}"
                raise RefitError(
                    f"engine {engine} of {self._workers.engines} has {has} where version {self.expected_version} was sent last: "
                    "refit all engines before they answer"
                )

    # generation

    def generate(
        self, data: BatchedDataDict[GenerationDatumSpec], greedy: bool = False, *, sampling: Sampling | None = None
    ) -> BatchedDataDict[GenerationOutputSpec]:
        """Complete every prompt, in the order of ``data``; ``truncated`` [B] bool comes on top of the NeMo-RL policy API's keys.

        Raises:
            BatchError: the prompts cannot be used.
            RefitError: the engines do not all have the version of the weights that was sent last.
            WorkerError: an engine died; ``restart`` makes new ones.
        """
        if not isinstance(data, BatchedDataDict):
            raise BatchError(f"data must be a BatchedDataDict, got {type(data).__name__}: wrap the dictionary in BatchedDataDict(...)")
        needed: BatchedDataDict[Any] = BatchedDataDict({name: data[name] for name in GENERATION_INPUTS if name in data})
        self._check(needed)
        self._require_weights()
        if "sampling_seeds" not in needed:
            generator = np.random.Generator(np.random.Philox(key=self._seed, counter=self._calls))
            needed["sampling_seeds"] = torch.from_numpy(generator.integers(0, 2**62, size=data.size))
        future = self.worker_group.run_all_workers_sharded_data(
            "generate",
            data=needed.deal(self._workers.engines, allow_uneven_shards=True),
            in_sharded_axes=["data_parallel"],
            common_kwargs={"greedy": greedy, "version": self.expected_version, "sampling": sampling},
        )
        results = self._results(future)
        # a call that is made again, of engines that were started anew, draws what the one that failed would have
        self._calls += 1
        return BatchedDataDict.from_batches(results, pad_value_dict={"output_ids": self.cfg["pad_token_id"]})

    def _check(self, data: BatchedDataDict[Any]) -> None:
        """Refuse prompts that an engine would fail over, and have to be started anew."""
        check_batch(data, required=(), vocab_size=self._vocab_size, max_length=self._longest, max_length_key=self._longest_key)
        stop_strings_of_rows(self.cfg["stop_strings"], data.get("stop_strings"), data.size)

    def score(self, data: BatchedDataDict[Any]) -> torch.Tensor | None:
        """Log-probabilities of given tokens; see ``RolloutEngine.score``. None where sampling changes the distribution, which engines score
        before that, and from workers without ``score``."""
        plain = self.cfg["temperature"] == 1 and self.cfg["top_p"] == 1 and self.cfg["top_k"] is None
        if not plain or not self.scores:
            return None
        self._require_weights()
        needed: BatchedDataDict[Any] = BatchedDataDict({name: data[name] for name in ("input_ids", "input_lengths")})
        future = self.worker_group.run_all_workers_sharded_data(
            "score",
            data=needed.deal(self._workers.engines, allow_uneven_shards=True),
            in_sharded_axes=["data_parallel"],
            common_kwargs={"version": self.expected_version},
        )
        found: torch.Tensor = BatchedDataDict.from_batches(self._results(future))["logprobs"]
        return found

    @property
    def scores(self) -> bool:
        """Whether workers have ``score``."""
        return False

    def requests(
        self, stop_token_ids: Iterable[int], pad_token_id: int, *, greedy: bool, sampling: Sampling | None, gathers: bool = False
    ) -> RequestStream:
        """A stream of requests; where the engines' workers have ``exchange``, each engine goes on while further ones come.

        Args:
            stop_token_ids, pad_token_id, greedy, sampling: as of ``RolloutEngine.requests``.
            gathers: as of ``EngineStream``; of no effect on workers without ``exchange``.
        """
        if not self.takes_requests:
            return super().requests(stop_token_ids, pad_token_id, greedy=greedy, sampling=sampling)
        self._require_weights()
        options = {"greedy": greedy, "version": self.expected_version, "sampling": sampling}
        return EngineStream(self, self._check, pad_token_id, options, gathers=gathers)

    @property
    def takes_requests(self) -> bool:
        """Whether workers have ``exchange``: they take requests while they complete others."""
        return False

    @property
    def engines(self) -> int:
        """How many there are."""
        return self._workers.engines

    def call_engine(self, method: str, engine: int, **options: Any) -> ray.ObjectRef[Any]:
        """Call one engine, on its first node."""
        return self.worker_group.run_single_worker_single_data(method, self.worker_group.get_dp_leader_worker_idx(engine), **options)

    def prepare_for_generation(self, *args: Any, **kwargs: Any) -> bool:
        """Take device memory again; ``tags`` says which: ``["weights"]`` before a refit, ``["kv_cache"]`` after it."""
        self._all("prepare_for_generation", tags=kwargs.get("tags"))
        return True

    def finish_generation(self, *args: Any, **kwargs: Any) -> bool:
        """Give the devices back to the policy. On a GPU that is shared the weights go too, and only a refit brings them back."""
        if not all(self._all("finish_generation")):
            self._forget()
        return True

    def shutdown(self) -> bool:
        """End the engines; True when all ended cleanly. May be called more than once."""
        try:
            return self.worker_group.shutdown(cleanup_method="shutdown")
        except Exception:
            logger.exception("shutting the engines' workers down failed")
            return False

    def _all(self, method: str, **options: Any) -> list[Any]:
        return self._results(self._call(method, **options))

    def _call(self, method: str, **options: Any) -> list[ray.ObjectRef[Any]]:
        """Call each engine, on its first node."""
        return self.worker_group.run_all_workers_single_data(method, run_rank_0_only_axes=[NODE], **options)

    def _results(self, futures: Any) -> list[Any]:
        try:
            return self.worker_group.get_all_worker_results(futures)
        except WorkerError as error:
            # one that died, or failed otherwise than on purpose: what it has now is not known
            self._forget()
            raise type(error)(f"{error}\nFix: start new engines with {type(self).__name__}.restart(policy), and refit them") from error


def engine_places(cluster: RayVirtualCluster, ranks: int, key: str) -> list[list[tuple[int, list[int]]]]:
    """Placement group and first bundle of each engine on each of its nodes.

    An engine's ranks, tensor parallel times pipeline parallel, are on one node where a node has places for whole engines, and otherwise
    fill whole neighbouring nodes.

    Args:
        cluster: has the places.
        ranks: of an engine.
        key: dotted key of the section with the engine's sizes, for messages.

    Raises:
        ConfigError: the places make no whole engines.
    """
    counts = [len(group.bundle_specs) for group in cluster.get_placement_groups()]
    if not any(count % ranks for count in counts):
        return [[(node, [first])] for node, count in enumerate(counts) for first in range(0, count, ranks)]
    nodes, rest = divmod(ranks, counts[0])
    if rest or len(set(counts)) > 1 or len(counts) % nodes:
        node = next(node for node, count in enumerate(counts) if count % ranks)
        raise ConfigError(
            f"{key}: tensor_parallel_size times pipeline_parallel_size = {ranks}: it does not divide the "
            f"{counts[node]} places of the engines on node {node}, and does not fill whole nodes of {counts} places. Fix: write sizes "
            "whose product does, or give another number of places"
        )
    return [[(node, [0]) for node in range(first, first + nodes)] for first in range(0, len(counts), nodes)]
