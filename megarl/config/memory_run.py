"""Memory of a run outside the training devices (generation engine, host memory of a node, disk), and the
memory ledger: the use of a device that policy and engine share, at each moment. All sizes are in bytes."""

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
"""Memory of a GPU if ``cluster.device_memory_gib`` is not set."""
CONTEXT_REST = GIB
"""Bytes of a process on a device besides its tensors: the CUDA context, kernels, workspaces of libraries.
Assumed, not measured."""
NCCL_CHANNELS = 24
"""Channels of a communicator: the maximum that NCCL 2.28 uses on one node of H100. Assumed, not measured."""
NCCL_BUFFERS = 4 * MIB + 640 * 120 * 8 * 8 + 512 * 8 * 8 * 16
"""Bytes of one channel's connection: NCCL_BUFFSIZE, and the buffers of the protocols LL128 (threads, values
per thread, steps, 8 bytes) and LL (threads, lines per thread, steps, 16 bytes), as in NCCL's ``device.h``."""
ENGINE_REST = 2 * GIB
"""Device memory of a sleeping engine's process: context, communicators, CUDA graphs. Assumed, not
measured."""
GRAPHS = GIB
"""Bytes of an engine's CUDA graphs, which are part of vLLM's share. Assumed, not measured."""
SLOT_BYTES, GATHERED_BYTES = GIB // 2, 5 * 64 * 2**20
"""Minimum bytes of half a refit buffer, and of the weights gathered for it, unless a configured size or a
larger weight needs more."""


@dataclass(frozen=True, slots=True)
class Moment:
    """Memory at one moment on a device that a policy rank shares with an engine rank.

    Attributes:
        name: name of the moment.
        policy: bytes of the policy's process: parameters, gradients, optimizer state, activations, and the
            constant overhead of the process.
        engine: bytes of the engine's process.
        transfer: bytes of the buffer for transferred weights, and of the weights gathered for it.
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
    """Return the moments of a run on a device shared with an engine, in order from the start to the first
    trained step.

    vLLM starts only if its whole budget is free, so the policy is offloaded first. A checkpoint restores the
    policy with the optimizer's moments; in a run without a checkpoint, the first step creates them.

    Args:
        policy: a checked ``policy`` section with its defaults.
        rank: the policy's rank in the fullest stage.
        engine: the engine's part of the device.
        facts: sizes of the model.
        beside: ranks of the other models in their fullest stages, by the names of their sections. They
            time-share the device with the policy.
        rest: memory that an offloaded training process still takes (``process_rest``).
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
        # vLLM keeps its rank's experts of a layer until all of them have arrived, and then loads them into a
        # new layer.
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
    """Return the moments of a run whose engines have separate devices: those of a training device, and those
    of an engine's device, which holds nothing of the policy.

    Both sides keep the transfer buffers of their group as long as the group exists. During a refit, the whole
    policy is still on its device after training, and the engine keeps its cache.

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
        # Count the experts twice, as for an engine that shares the device and has slept until then.
        Moment("refit, a device of an engine", 0, engine.budget + 2 * engine.experts, slots),
    ]


def _refit_bytes(policy: PolicyConfig, facts: ModelFacts) -> tuple[int, int]:
    """Return the bytes of the two transfer buffers of a refit, and of the weights gathered for it."""
    largest = facts.vocab_size * facts.hidden_size * BYTES[policy["precision"]]
    configured = policy["refit_buffer_size_gb"]
    if configured is not None:
        # A configured size covers both buffers. Each, however, must hold the largest weight, which is
        # gathered in addition if it exceeds the memory that is reserved for gathering.
        return max(int(configured * GIB), 2 * largest), largest if largest > GATHERED_BYTES else 0
    return 2 * max(SLOT_BYTES, largest), max(GATHERED_BYTES, largest)


def device_gib(cluster: ClusterConfig) -> float:
    """Return the memory of a GPU in GiB, as configured or assumed."""
    given = cluster["device_memory_gib"]
    return ASSUMED_DEVICE_GIB if given is None else float(given)


def process_rest(groups: int) -> int:
    """Return the bytes that a process with this number of NCCL communicators takes on a device besides its
    tensors, even after these are offloaded."""
    return CONTEXT_REST + groups * NCCL_CHANNELS * NCCL_BUFFERS


def _moment_bytes(policy: PolicyConfig, rank: RankMemory) -> int:
    """Return the bytes of optimizer state on the device that the first step creates: the moments, and also
    the copies of weights if megarl keeps the state."""
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
    """Return the bytes of host memory of a node that trains.

    Each training rank counts the reference policy, and a copy of the weights that it swaps with. It also
    counts optimizer state that stays in host memory. Other optimizer state and the weights are counted if an
    engine on the same device or another model offloads them, and optimizer state also if
    ``offload_optimizer_for_logprob`` is set. Ranks on a CPU count everything. Each rank of a separate engine
    on the same node counts the host memory of a refit. Adapters on one base have it once. A checkpoint that
    is written during training is not counted.

    Args:
        config: a checked run with its defaults.
        ranks: ranks of the policy.
        beside: ranks of each other model, by the path of its section. Each model, and then the policy too, is
            offloaded while another one uses the device.
        engine: memory of an engine rank; None if there are no engines, or it is unknown.
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
    # Weights of a torch backend on a GPU get new host memory at each offload, so that none is shared.
    if on_cpu or enabled_backend(config["policy"]) == "megatron":
        for path, each in beside.items():
            if share_a_base(config["policy"], at(config, path)):
                together -= min(rank.frozen for rank in (*ranks, *each))
    if on_cpu:
        # A model has its own base until it is built.
        together = max(together, sum(max(rank.weights + rank.gradients for rank in each) for each in models))
    view = View(config)
    training, apart = training_shape(view)[1], generation_shape(view)
    found = training * together
    # With several nodes, separate engines have their own nodes.
    if apart is not None and engine is not None and config["cluster"]["num_nodes"] == 1:
        found += apart[1] * (engine.host + on_cpu * engine.budget)
    return int(found)


def checkpoint_bytes(policy: PolicyConfig, facts: ModelFacts) -> int:
    """Return the bytes of one checkpoint as the backend writes it: weights, float32 copies of them and the
    optimizer's moments. With adapters, only these are counted.

    Megatron writes the weights in ``policy.precision``, and float32 copies of them with the distributed
    optimizer or in 16 bit. The torch backends write the weights that they update.
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
    """Return the bytes that trained models other than the policy add to a checkpoint, without models of
    unknown size."""
    total = 0
    for path, section in model_sections(config).items():
        model = at(config, path)
        facts = facts_of_policy(model) if section.is_trained else None
        if facts is not None:
            total += checkpoint_bytes(model, facts)
    return total


def checkpoints_kept(config: RunConfig) -> int:
    """Return the maximum number of checkpoints on disk at once: those that are kept, the newest one, and the
    one being written."""
    section = config["checkpointing"]
    steps = own_section(config)["max_num_steps"]
    written = -(-steps // section["save_period"])
    return min(written, written if section["keep_top_k"] is None else section["keep_top_k"] + 2)


def disk_bytes(config: RunConfig, facts: ModelFacts) -> int:
    """Return the maximum size of the run's directory: checkpoints and the exported model."""
    section, policy = config["checkpointing"], config["policy"]
    exported = model_parameters(facts) * BYTES[policy["precision"]] if section["export_hf"] else 0
    together = checkpoint_bytes(policy, facts) + checkpoint_bytes_beside(config)
    return exported + (checkpoints_kept(config) * together if section["enabled"] else 0)
