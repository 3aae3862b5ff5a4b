"""Rollout engines on the policy's own backend: workers on separate ranks that only generate, with weights
from refits.

They make separate generation, and so asynchronous training, possible on any machine. Tokens and
log-probabilities come from the same code as the policy's own.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, NotRequired

from typing_extensions import TypedDict

from megarl.config.backend import enabled_backend, generation_of
from megarl.config.plugins import EngineMemory
from megarl.config.policy import PolicyConfig
from megarl.config.sections import RunConfig
from megarl.errors import MegarlError, RefitError
from megarl.key import AT_LEAST_1, Key
from megarl.models.generation.engines import EngineKind
from megarl.models.generation.interfaces import (
    GenerationDatumSpec,
    GenerationOutputSpec,
    RolloutEngine,
    Sampling,
    SharesDevices,
)

if TYPE_CHECKING:
    import ray
    import torch

    from converters.model_config.architecture import ModelFacts
    from megarl.distributed.batched_data_dict import BatchedDataDict
    from megarl.distributed.virtual_cluster import RayVirtualCluster
    from megarl.models.policy.lm_policy import Policy
    from megarl.weight_sync.manifest import Description

logger = logging.getLogger(__name__)

WORKERS = "generation"
"""Name of the engines' worker group."""

LIFE_SECONDS = 60.0
"""Time limit in seconds for a worker's reply to ``is_alive``, counted from the end of the call it is
running."""


class PolicyEnginesConfig(TypedDict):
    """Parallel layout of engines on the policy's own backend."""

    tensor_parallel_size: NotRequired[
        Annotated[
            int,
            Key(
                "number of ranks over which each layer of an engine is split; as many engines start as fit "
                "on the generation ranks.",
                AT_LEAST_1,
                default=1,
            ),
        ]
    ]


class PolicyEngines(RolloutEngine):
    """A rollout engine implemented by a second ``Policy`` that is never trained.

    Args:
        make: builds that policy.
    """

    def __init__(self, make: Callable[[], Policy]) -> None:
        self._make = make
        self._weights: Description = {}
        self._connected = False
        self._version: int | None = None
        self._policy = make()

    @property
    def version(self) -> int | None:
        """Version of the weights on all ranks. None if some rank has no weights, or if versions differ."""
        return self._version

    @property
    def ranks(self) -> int:
        """Number of engine ranks, over all replicas of the model."""
        return len(self._policy.worker_group.workers)

    @property
    def connected(self) -> bool:
        """True if ``init_collective`` was called since the workers were started."""
        return self._connected

    def disconnect(self) -> None:
        """Mark the engine as not connected to the policy's process group."""
        self._connected = False

    def results(self, futures: list[ray.ObjectRef[Any]]) -> list[Any]:
        """Wait for the futures of this object's methods, and return their results."""
        return self._policy.worker_group.get_all_worker_results(futures)

    def prepare_refit_info(self, state_dict_info: Description) -> None:
        """Store names, shapes and dtypes of the weights that refits will send."""
        self._weights = state_dict_info
        # The engine may hold other weights than those described, so require a refit before it generates.
        self._version = None

    def init_collective(self, ip: str, port: int, world_size: int) -> list[ray.ObjectRef[Any]]:
        """Join the process group of the training policy; see ``GenerationInterface.init_collective``.

        Raises:
            RefitError: ``world_size`` is not the number of engine ranks plus one.
        """
        if world_size != self.ranks + 1:
            raise RefitError(
                f"world_size = {world_size}: {self.ranks} ranks that generate and the policy make "
                f"{self.ranks + 1}"
            )
        # All ranks join, also those of further replicas: each receives the broadcast and keeps its own shard.
        self._version, self._connected = None, True
        return self._call("connect", weights=self._weights, address=[ip, port, world_size, 1])

    def update_weights_from_collective(self) -> list[ray.ObjectRef[Any]]:
        """Receive all weights from the training policy. Await the futures together with the policy's
        futures."""
        # From here until ``loaded``, the weights are a mixture of two versions.
        self._version = None
        return self._call("update_from_broadcast")

    def loaded(self, versions: list[Any]) -> None:
        """Set ``version`` from the results of ``update_weights_from_collective``."""
        # All ranks must have the same version, because replicas with different weights must not generate.
        found = set(versions)
        self._version = found.pop() if len(found) == 1 else None

    def generate(
        self,
        data: BatchedDataDict[GenerationDatumSpec],
        greedy: bool = False,
        *,
        sampling: Sampling | None = None,
    ) -> BatchedDataDict[GenerationOutputSpec]:
        """Generate a response to every prompt; see ``Policy.generate``.

        Raises:
            RefitError: the workers have no complete weights, for example after a failed refit.
            BatchError: the prompts are invalid.
        """
        self._require_weights()
        return self._policy.generate(data, greedy, sampling=sampling)

    def score(self, data: BatchedDataDict[Any]) -> list[torch.Tensor]:
        """Return the log-probabilities of given tokens, in a list of one element because all replicas of the
        model count as one engine. See ``RolloutEngine.score``.

        Raises:
            RefitError: the workers have no complete weights, for example after a failed refit.
        """
        self._require_weights()
        self._policy.prepare_for_lp_inference()
        return [self._policy.get_logprobs(data)["logprobs"]]

    def weight_digests(self) -> list[dict[str, int]]:
        """Return the weight digests of every rank, ordered by rank."""
        return self.results(self._call("weight_digests"))

    def prepare_for_generation(self, *args: Any, **kwargs: Any) -> bool:
        """Move the parameters to the device. They stay there, because the devices are not shared."""
        return self._policy.prepare_for_generation()

    def finish_generation(self, *args: Any, **kwargs: Any) -> bool:
        """Do nothing: the devices are not shared."""
        return True

    def is_alive(self) -> bool:
        """Return whether all workers reply, and none hangs in a call that timed out."""
        try:
            self._policy.worker_group.get_all_worker_results(self._call("is_alive"), timeout_s=LIFE_SECONDS)
        except MegarlError:
            return False
        return True

    def restart(self, policy: SharesDevices | None = None) -> None:
        """Replace all workers by new ones. They can generate only after ``init_collective`` and a full
        refit."""
        self._version = None
        self.disconnect()
        calls = self._policy.generate_calls
        self.shutdown()
        self._policy = self._make()
        # Restore the call count: starting at 0, the new workers would reuse the seeds of the first calls.
        self._policy.generate_calls = calls

    def shutdown(self) -> bool:
        """Shut down the workers. Return True if all of them exited cleanly. Further calls are allowed."""
        return self._policy.shutdown()

    def _require_weights(self) -> None:
        if self._version is None:
            raise RefitError(
                "the workers that generate have no complete weights: refit them before they generate"
            )

    def _call(self, method: str, **options: Any) -> list[ray.ObjectRef[Any]]:
        return self._policy.worker_group.run_all_workers_single_data(method, **options)


def engine_policy(policy: PolicyConfig, ranks: int) -> PolicyConfig:
    """Return the policy section for workers that only generate.

    It shards layers over the engines' own ``tensor_parallel_size`` only: without gradients and a backward
    pass, pipeline, context and expert parallelism have no benefit. It has no adapters, because refits send
    merged weights.

    Args:
        policy: the run's policy section, with defaults filled in.
        ranks: number of engine ranks.
    """
    generation = policy["generation"]
    assert generation is not None
    tensor = generation["engine_cfg"]["tensor_parallel_size"]
    own: dict[str, Any] = {
        **policy,
        "generation": {
            **generation,
            # This policy's own workers generate, so that its validation must not expect further engines.
            "colocated": {"enabled": True},
            "engine_cfg": {},
            "engine_check": {"sequences": 0},
        },
        "peft": None,
        "merged_adapter": None,
        # No batch is trained on, but validation requires sizes that the number of ranks divides.
        "train_global_batch_size": ranks,
        "train_micro_batch_size": 1,
        "sequence_packing": {"enabled": False},
        "dynamic_batching": {"enabled": False},
    }
    if enabled_backend(policy) == "megatron":
        own["megatron_cfg"] = {**policy["megatron_cfg"], **_ONE_STAGE, "tensor_model_parallel_size": tensor}
    else:
        # Use DTensor for FSDP1 policies too: FSDP1 has no tensor parallelism, and can only gather a full
        # model.
        own["dtensor_cfg"] = {"enabled": True, "tensor_parallel_size": tensor}
        own["dynamic_batching"] = {"enabled": False}
    return own  # type: ignore[return-value]


_ONE_STAGE = {
    "pipeline_model_parallel_size": 1,
    "virtual_pipeline_model_parallel_size": None,
    "num_layers_in_first_pipeline_stage": None,
    "num_layers_in_last_pipeline_stage": None,
    "pipeline_model_parallel_layout": None,
    "context_parallel_size": 1,
    "sequence_parallel": False,
    "expert_model_parallel_size": 1,
    "expert_tensor_parallel_size": 1,
}


def start(cluster: RayVirtualCluster, config: RunConfig) -> PolicyEngines:
    """Start a run's engine workers.

    Raises:
        ConfigError: the parallel layout does not match the number of bundles.
    """
    from megarl.data.tokenization import get_tokenizer
    from megarl.distributed.deadlines import PhaseDeadlines
    from megarl.models.policy.lm_policy import Policy

    policy, deadlines = config["policy"], config["deadlines"]
    section = engine_policy(policy, cluster.world_size())
    tokenizer = get_tokenizer(policy["tokenizer"], policy["trust_remote_code"])

    def make() -> Policy:
        return Policy(
            cluster,
            section,
            tokenizer,
            name_prefix=WORKERS,
            init_optimizer=False,
            init_reference_model=False,
            seed=config["seed"],
            init_timeout_s=deadlines["init_s"],
            deadlines=PhaseDeadlines.of(deadlines, WORKERS),
        )

    return PolicyEngines(make)


def memory_of_engine(config: RunConfig, facts: ModelFacts) -> EngineMemory:
    """Estimate the memory of one engine rank: the model without training state, and a KV cache for
    ``generation_batch_size`` sequences. ``host`` is the full model, which a refit stages in host memory."""
    from megarl.config import validate_policy_config
    from megarl.config.layout import Layout
    from megarl.config.memory import BYTES
    from megarl.config.memory_run import process_rest
    from megarl.config.parameters import model_parameters
    from megarl.config.plan import communicators, memory_of_reader
    from megarl.config.rules.parallel import generation_shape
    from megarl.config.rules.view import View

    shape = generation_shape(View(config))
    assert shape is not None, "these engines have ranks of their own"
    nodes, per_node = shape
    # Validation fills in the defaults that the memory estimate reads.
    policy = validate_policy_config(engine_policy(config["policy"], nodes * per_node), nodes * per_node)
    tensor = generation_of(config["policy"])["engine_cfg"]["tensor_parallel_size"]
    layout = Layout(1, nodes * per_node // tensor, 1, tensor, per_node)
    [rank] = memory_of_reader({**config, "policy": policy}, facts, layout)
    rows, longest = policy["generation_batch_size"], policy["max_total_sequence_length"]
    budget = process_rest(communicators(layout, policy)) + rank.peak
    return EngineMemory(
        weights=rank.weights,
        budget=budget,
        token=rank.generation_cache // (rows * longest),
        share=f"{rows} sequences of {longest:,} tokens",
        rest=budget - rank.weights - rank.generation_cache,
        host=model_parameters(facts) * BYTES[policy["precision"]],
        ranks=tensor,
    )


KIND = EngineKind(
    title="workers that generate", start=start, section=PolicyEnginesConfig, memory=memory_of_engine
)
