"""Memory of a run outside training itself, in bytes: engine, host memory of a node, disk. The memory ledger
lists the use of a device that policy and engine share, moment by moment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from converters.model_config.architecture import ModelFacts
from megarl.config.adapters import (
    adapter_parameters,
    adapters_of,
    share_a_base,
    vocabulary_adapter_parameters,
)
from megarl.config.algorithms import generates, own_section
from megarl.config.backend import enabled_backend
from megarl.config.engines import is_engine
from megarl.config.memory import BYTES, MOMENTS, RankMemory, has_own_states, weight_bytes
from megarl.config.model_facts import facts_of_policy
from megarl.config.models import model_sections
from megarl.config.nested import at
from megarl.config.parameters import model_parameters
from megarl.config.plugins import EngineMemory
from megarl.config.policy import PolicyConfig
from megarl.config.rules.parallel import generation_shape, training_shape
from megarl.config.rules.view import View
from megarl.config.sections import ClusterConfig, RunConfig

GIB = 2**30
MIB = 2**20
ASSUMED_DEVICE_GIB = 80.0
"""Memory of a GPU in GiB if ``cluster.device_memory_gib`` is null."""
CONTEXT_REST = GIB
"""Device memory of a process besides its tensors: CUDA context, kernels, library workspaces. Assumed, not
measured."""
NCCL_CHANNELS = 24
"""Channels per NCCL communicator: the maximum of NCCL 2.28 on one H100 node. Assumed, not measured."""
NCCL_BUFFERS = 4 * MIB + 640 * 120 * 8 * 8 + 512 * 8 * 8 * 16
"""Bytes per NCCL channel: NCCL_BUFFSIZE, the LL128 buffer (threads, values per thread, steps, 8 bytes), and
the LL buffer (threads, lines per thread, steps, 16 bytes), as in NCCL's ``device.h``."""
ENGINE_REST = 2 * GIB
"""Device memory of a sleeping engine: context, communicators, CUDA graphs. Assumed, not measured."""
GRAPHS = GIB
"""Bytes of an engine's CUDA graphs, which count towards its memory budget. Assumed, not measured."""
SLOT_BYTES, GATHERED_BYTES = GIB // 2, 5 * 64 * 2**20
"""Default bytes of half a refit buffer, and of the weights being gathered for it. A larger weight raises
them; ``refit_buffer_size_gb`` replaces them."""


@dataclass(frozen=True, slots=True)
class Moment:
    """Device memory at one moment of a run, on a device that a policy rank shares with an engine rank.

    Attributes:
        name: name of the moment.
        policy: bytes of the policy's processes: tensors, and the constant overhead of a process.
        engine: bytes of the engine's process.
        transfer: bytes of refit buffers, and of weights gathered for them.
    """

    name: str
    policy: int
    engine: int
    transfer: int = 0

    @property
    def total(self) -> int:
        return self.policy + self.engine + self.transfer


def device_ledger(
    policy: PolicyConfig,
    rank: RankMemory,
    engine: EngineMemory,
    facts: ModelFacts,
    beside: Mapping[str, RankMemory] = MappingProxyType({}),
    *,
    rest: int = CONTEXT_REST,
) -> list[Moment]:
    """Return the memory of a device that policy and engine share, at each moment from the start to the first
    training step.

    vLLM starts only if its whole budget is free, so the policy is offloaded before. A resumed policy has the
    optimizer's moments from its checkpoint, whereas a new run creates them in the first step.

    Args:
        policy: a checked ``policy`` section with its defaults.
        rank: the policy's rank with the highest peak.
        engine: memory of the engine on the device.
        facts: sizes of the model.
        beside: fullest rank of each other model on the device, by section path. These models use the device
            in turn with the policy.
        rest: device memory that an offloaded training process still takes (``process_rest``).
    """
    slots, gathered = _refit_bytes(policy, facts)
    # Each model has its own processes on the device.
    rest *= 1 + len(beside)
    resumed, trained = rest + rank.weights + rank.gradients + rank.optimizer, rest + rank.peak
    parameters = rest + rank.weights
    return [
        Moment("policy built, first start", resumed - _moment_bytes(policy, rank), 0),
        Moment("policy built, resumed", resumed, 0),
        Moment("engine starts, policy offloaded", rest, engine.budget),
        Moment("engine sleeps, parameters reloaded", parameters, ENGINE_REST),
        # Twice the experts of a layer: vLLM collects all that belong to its rank, then loads them into a new
        # layer.
        Moment("refit", parameters, ENGINE_REST + engine.weights + 2 * engine.experts, slots + gathered),
        Moment("generation", rest, engine.budget, slots),
        Moment("log-probabilities", parameters + rank.scoring, ENGINE_REST, slots),
        Moment("training", trained, ENGINE_REST, slots),
        *(Moment(f"{name} active", rest + other.peak, ENGINE_REST, slots) for name, other in beside.items()),
    ]


def moments_apart(
    policy: PolicyConfig,
    rank: RankMemory,
    engine: EngineMemory,
    facts: ModelFacts,
    beside: Mapping[str, RankMemory] = MappingProxyType({}),
    *,
    rest: int = CONTEXT_REST,
) -> list[Moment]:
    """Return the memory of a training device and of an engine's device in each phase of a step, if engines
    have devices of their own.

    Both keep their refit buffers between refits. During a refit the policy stays on its device with its
    optimizer state, and the engine keeps its KV cache.

    Args:
        policy, rank, engine, facts, beside, rest: as in ``device_ledger``.
    """
    slots, gathered = _refit_bytes(policy, facts)
    rest *= 1 + len(beside)
    return [
        Moment("training", rest + rank.peak, 0, slots),
        Moment("refit", rest + rank.state, 0, slots + gathered),
        *(Moment(f"{name} active", rest + other.peak, 0, slots) for name, other in beside.items()),
        Moment("generation, a device of an engine", 0, engine.budget, slots),
        # Twice the experts of a layer, as in ``device_ledger``.
        Moment("refit, a device of an engine", 0, engine.budget + 2 * engine.experts, slots),
    ]


def _refit_bytes(policy: PolicyConfig, facts: ModelFacts) -> tuple[int, int]:
    """Return (bytes of a refit's two buffers, bytes of the weights being gathered for them)."""
    # Assume that the embedding is the largest weight.
    largest = facts.vocab_size * facts.hidden_size * BYTES[policy["precision"]]
    configured = policy["refit_buffer_size_gb"]
    if configured is not None:
        # A configured size covers both buffers and gathering. Each buffer must hold the largest weight,
        # however; a weight above the gathering reserve is counted in addition.
        return max(int(configured * GIB), 2 * largest), largest if largest > GATHERED_BYTES else 0
    return 2 * max(SLOT_BYTES, largest), max(GATHERED_BYTES, largest)


def device_gib(cluster: ClusterConfig) -> float:
    """Return the memory of a GPU in GiB: ``device_memory_gib``, or ``ASSUMED_DEVICE_GIB`` if that is null."""
    given = cluster["device_memory_gib"]
    return ASSUMED_DEVICE_GIB if given is None else float(given)


def process_rest(groups: int) -> int:
    """Return the device memory in bytes that a training process takes besides its tensors, even when
    offloaded.

    Args:
        groups: number of the process's NCCL communicators.
    """
    return CONTEXT_REST + groups * NCCL_CHANNELS * NCCL_BUFFERS


def _moment_bytes(policy: PolicyConfig, rank: RankMemory) -> int:
    """Return the bytes of optimizer state that only the first step allocates: the moments, and the float32
    copies of weights if megarl instead of Megatron-Core holds the state."""
    if enabled_backend(policy) != "megatron" or has_own_states(policy["megatron_cfg"]["optimizer"]):
        return rank.optimizer
    optimizer, element = policy["megatron_cfg"]["optimizer"], BYTES[policy["precision"]]
    moments = MOMENTS if optimizer["optimizer"] == "adam" else int(optimizer["sgd_momentum"] > 0)
    in_float32 = (
        policy["megatron_cfg"]["distributed_data_parallel_config"]["grad_reduce_in_fp32"] or element == 4
    )
    copies = (element < 4) + (not in_float32)
    return rank.optimizer * moments // max(moments + copies, 1)


def host_memory(
    config: RunConfig,
    ranks: Sequence[RankMemory],
    beside: Mapping[str, Sequence[RankMemory]] = MappingProxyType({}),
    engine: EngineMemory | None = None,
) -> int:
    """Return the host memory in bytes of one training node.

    Each rank needs it for the reference policy, with a swap copy of its weights, and for optimizer state in
    host memory. With a colocated engine or another model on the device, the rank's weights and optimizer
    state are offloaded too; with ``offload_optimizer_for_logprob`` the optimizer state. On a CPU everything
    is in host memory. Ranks of separate engines on the node need it for refits. Models that share base
    weights count them once. A checkpoint written in the background is not counted.

    Args:
        config: a checked run with its defaults.
        ranks: memory of the policy's ranks, one per pipeline stage.
        beside: memory of the ranks of each other model, by section path.
        engine: memory of an engine on a device; None if there is no engine, or its memory is unknown.
    """
    generation = config["policy"]["generation"]
    on_cpu = config["cluster"]["device"] == "cpu"
    colocated = generation is not None and is_engine(generation) and generation["colocated"]["enabled"]
    colocated = colocated or bool(beside)
    offloads = (generates(config) and config["policy"]["offload_optimizer_for_logprob"]) or colocated

    def of_rank(rank: RankMemory) -> int:
        if on_cpu:
            return rank.peak + 2 * rank.reference_weights + rank.host_optimizer
        moved = offloads * rank.optimizer + colocated * rank.weights
        return 2 * rank.reference_weights + rank.host_optimizer + moved

    models = (ranks, *beside.values())
    together = sum(max(map(of_rank, each)) for each in models)
    # On a GPU, DTensor and FSDP1 allocate new host memory at each offload, so two models share no base
    # weights there.
    if on_cpu or enabled_backend(config["policy"]) == "megatron":
        for path, each in beside.items():
            if share_a_base(config["policy"], at(config, path)):
                together -= min(rank.frozen for rank in (*ranks, *each))
    if on_cpu:
        # While it is built, each model has base weights of its own.
        together = max(together, sum(max(rank.weights + rank.gradients for rank in each) for each in models))
    view = View(config)
    training, apart = training_shape(view)[1], generation_shape(view)
    found = training * together
    # With several nodes, separate engines are on other nodes than training.
    if apart is not None and engine is not None and config["cluster"]["num_nodes"] == 1:
        found += apart[1] * (engine.host + on_cpu * engine.budget)
    return int(found)


def checkpoint_bytes(policy: PolicyConfig, facts: ModelFacts) -> int:
    """Return the bytes of one checkpoint of a model: weights, their float32 copies and the optimizer's
    moments; with adapters, only those of the adapters.

    Megatron writes weights in ``policy.precision``, and float32 copies if these have 16 bits or the optimizer
    is distributed. The DTensor and FSDP1 backends write the weights that they update.
    """
    adapters, element = adapters_of(policy), BYTES[policy["precision"]]
    parameters = model_parameters(facts)
    if adapters is not None:
        outside = vocabulary_adapter_parameters(adapters, facts)
        parameters = adapter_parameters(adapters, facts, range(facts.num_layers)) + sum(outside)
    if enabled_backend(policy) != "megatron":
        return parameters * (weight_bytes(policy) + 2 * 4)
    optimizer = policy["megatron_cfg"]["optimizer"]
    moments = 2 if optimizer["optimizer"] == "adam" else int(optimizer["sgd_momentum"] > 0)
    copies = optimizer["use_distributed_optimizer"] or element < 4
    return parameters * (element + 4 * (moments + copies))


def checkpoint_bytes_beside(config: RunConfig) -> int:
    """Return the bytes that trained models other than the policy add to a checkpoint. Models of unknown size
    are not counted."""
    total = 0
    for path, section in model_sections(config).items():
        model = at(config, path)
        facts = facts_of_policy(model) if section.is_trained else None
        if facts is not None:
            total += checkpoint_bytes(model, facts)
    return total


def checkpoints_kept(config: RunConfig) -> int:
    """Return the maximum number of checkpoints on disk at a time: the best, the newest, and the one being
    written."""
    section = config["checkpointing"]
    steps = own_section(config)["max_num_steps"]
    written = -(-steps // section["save_period"])
    return min(written, written if section["keep_top_k"] is None else section["keep_top_k"] + 2)


def disk_bytes(config: RunConfig, facts: ModelFacts) -> int:
    """Return the maximum bytes of checkpoints and exported model in the run directory."""
    section, policy = config["checkpointing"], config["policy"]
    exported = model_parameters(facts) * BYTES[policy["precision"]] if section["export_hf"] else 0
    together = checkpoint_bytes(policy, facts) + checkpoint_bytes_beside(config)
    return exported + (checkpoints_kept(config) * together if section["enabled"] else 0)
