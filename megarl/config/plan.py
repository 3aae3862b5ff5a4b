"""Memory plan of a whole run, and the check that the devices have enough memory for it. A run whose weights,
gradients and optimizer state exceed a device is refused; if only the complete estimate does, there is a
warning."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import cast

from converters.model_config.architecture import ModelFacts
from megarl.config.algorithms import generates, roles, rows_of_record, step_size
from megarl.config.arithmetic import BatchPlan, each_of
from megarl.config.backend import enabled_backend, generation_of
from megarl.config.engines import OF_THE_POLICY, kind_of
from megarl.config.layout import Layout
from megarl.config.memory import RankMemory, estimate, estimate_sharded
from megarl.config.memory_run import GIB, Moment, device_gib, device_ledger, moments_apart, process_rest
from megarl.config.model_facts import facts_of_policy
from megarl.config.models import model_sections
from megarl.config.nested import at, put
from megarl.config.plugins import EngineMemory
from megarl.config.policy import MOMENT_KEYS, PolicyConfig
from megarl.config.rules.models import with_model_as_policy
from megarl.config.rules.parallel import layout_of
from megarl.config.rules.view import NotApplicableError, View
from megarl.config.sections import RunConfig
from megarl.errors import Violation


def batch_plan(config: RunConfig, layout: Layout) -> BatchPlan:
    """Return the batch sizes of one training step of a checked run."""
    policy = config["policy"]
    (prompts, generations), rows = step_size(config), rows_of_record(config)
    packing, batching = policy["sequence_packing"], policy["dynamic_batching"]
    by_tokens = packing if packing["enabled"] else batching
    return BatchPlan(
        prompts=prompts,
        generations=generations * rows,
        global_batch_size=policy["train_global_batch_size"] * rows,
        data_parallel=layout.data,
        micro_batch_size=policy["train_micro_batch_size"] * rows,
        sequence_length=policy["max_total_sequence_length"],
        token_budget=by_tokens["train_mb_tokens"] if by_tokens["enabled"] else 0,
        logprob_token_budget=by_tokens["logprob_mb_tokens"] if by_tokens["enabled"] else 0,
    )


def has_reference_policy(config: RunConfig) -> bool:
    """Return whether a checked run keeps its initial weights as a reference policy."""
    return any(role.name == "reference" for role in roles(config))


def memory_of_run(config: RunConfig) -> tuple[Layout, list[RankMemory]]:
    """Return the rank layout of a checked run's policy, and the memory of one rank per pipeline stage (an
    empty list if the model's sizes are unknown)."""
    layout = layout_of(View(config))
    facts = facts_of_policy(config["policy"])
    return layout, [] if facts is None else _memory(
        config, facts, layout, reference=has_reference_policy(config)
    )


def memory_of_models(config: RunConfig) -> dict[str, list[RankMemory]]:
    """Return the memory of one rank per pipeline stage for each model other than the policy, by the dotted
    path of its section. Models of unknown size are left out."""
    found = {}
    for path, section in model_sections(config).items():
        facts = facts_of_policy(at(config, path))
        if facts is None:
            continue
        # Only the policy generates, so the other models have no KV cache.
        seen = put(cast(RunConfig, with_model_as_policy(config, path)), "policy.generation", None)
        layout = layout_of(View(seen))
        found[path] = (
            _memory(seen, facts, layout, reference=False)
            if section.is_trained
            else memory_of_reader(seen, facts, layout)
        )
    return found


def memory_of_reader(config: RunConfig, facts: ModelFacts, layout: Layout) -> list[RankMemory]:
    """Return the memory of one rank per pipeline stage of a model that is not trained. Megatron allocates
    gradient buffers for it nevertheless.

    Args:
        config: a run in which the model's section replaces ``policy``.
        facts: sizes of the model.
        layout: sizes of the parallel axes.
    """
    ranks = _memory(config, facts, layout, reference=False)
    is_megatron = enabled_backend(config["policy"]) == "megatron"
    return [
        replace(
            rank,
            gradients=rank.gradients * is_megatron,
            optimizer=0,
            activations=0,
            recomputed=0,
            logits=0,
        )
        for rank in ranks
    ]


def _memory(config: RunConfig, facts: ModelFacts, layout: Layout, *, reference: bool) -> list[RankMemory]:
    policy, plan = config["policy"], batch_plan(config, layout)
    if enabled_backend(policy) == "megatron":
        return estimate(policy, facts, layout, plan, reference=reference, device=config["cluster"]["device"])
    return [estimate_sharded(policy, facts, layout, plan, reference=reference)]


def ledger(config: RunConfig, facts: ModelFacts, ranks: list[RankMemory]) -> list[Moment]:
    """Return the memory of the fullest device at each moment of a run, from ``device_ledger`` if policy and
    engine share devices, else from ``moments_apart``. Empty if the policy itself generates, or if the
    engine's memory is unknown.

    Args:
        config: a checked run with its defaults.
        facts: sizes of the policy's model.
        ranks: memory of the policy's ranks, from ``memory_of_run``.
    """
    engine = engine_memory_of(config, facts)
    if engine is None:
        return []
    fullest = {
        path: max(of_model, key=lambda rank: rank.peak) for path, of_model in memory_of_models(config).items()
    }
    policy, rest = config["policy"], process_rest(communicators(layout_of(View(config)), config["policy"]))
    of_run = device_ledger if generation_of(policy)["colocated"]["enabled"] else moments_apart
    return of_run(policy, max(ranks, key=lambda rank: rank.peak), engine, facts, fullest, rest=rest)


def engine_memory_of(config: RunConfig, facts: ModelFacts) -> EngineMemory | None:
    """Return the memory of the run's engine on one device; None if there is no engine or its memory is
    unknown."""
    if not generates(config) or config["cluster"]["device"] == "cpu":
        return None
    generation = generation_of(config["policy"])
    kind = kind_of(generation)
    return None if kind is None or kind.memory is None else kind.memory(config, facts)


def communicators(layout: Layout, policy: PolicyConfig) -> int:
    """Return the number of NCCL communicators of a training rank: one for each of its process groups with
    more than one rank."""
    megatron = policy["megatron_cfg"]
    # A disabled megatron_cfg has no defaults filled in.
    experts = (megatron.get("expert_model_parallel_size", 1), megatron.get("expert_tensor_parallel_size", 1))
    sharing = layout.data * layout.context
    # A group of one rank needs no communicator.
    sizes = (
        layout.world_size,
        layout.tensor,
        layout.context,
        layout.data,
        layout.pipeline,
        layout.pipeline * layout.tensor,
        *experts,
    )
    # Gradients are reduced over data- and context-parallel ranks together. Without context parallelism, that
    # group is the data group.
    return sum(size > 1 for size in (*sizes, sharing * (layout.context > 1)))


def size_text(size: int) -> str:
    """Return a number of bytes as text with a binary unit."""
    amount = float(size)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if amount < 1024:
            return f"{amount:.0f} B" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1024
    return f"{amount:.2f} TiB"


# Check of the plan against the devices' memory.


def fullest_moment(config: RunConfig) -> Moment | None:
    """Return the moment at which a training device of a checked run has the least free memory; None if the
    model's sizes are unknown."""
    facts = facts_of_policy(config["policy"])
    if facts is None:
        return None
    layout, ranks = memory_of_run(config)
    moments = ledger(config, facts, ranks)
    # Without an engine there is no ledger; the peaks of the models decide.
    if not moments:
        rest = process_rest(communicators(layout, config["policy"]))
        beside = memory_of_models(config)
        alone = {"training": ranks, **{f"{path} active": of_model for path, of_model in beside.items()}}
        for name, of_model in alone.items():
            peak = max(rank.peak for rank in of_model)
            moments.append(Moment(name, peak + rest * (1 + len(beside)), 0))
    return max(moments, key=lambda moment: moment.total)


def state_bytes(config: RunConfig) -> int:
    """Return the bytes of weights, gradients and optimizer state on the rank that has the most, over all
    models and pipeline stages of a checked run."""
    ranks = itertools.chain(memory_of_run(config)[1], *memory_of_models(config).values())
    return max((rank.state for rank in ranks), default=0)


def state_fits(config: RunConfig) -> Iterator[Violation]:
    """Yield a violation if weights, gradients and optimizer state alone exceed
    ``cluster.device_memory_gib``, because training would fail in its first step."""
    cluster, key = config.get("cluster") or {}, "cluster.device_memory_gib"
    gib = cluster.get("device_memory_gib")
    if gib is None or cluster["device"] == "cpu" or cluster["memory_check"] != "refuse":
        return
    needed = state_bytes(config)
    if needed > gib * GIB:
        yield Violation(
            key,
            gib,
            f"weights, gradients and optimizer state of a rank alone take {size_text(needed)}",
            (
                "train a smaller model, or divide it over more devices (cluster.memory_check=warn "
                "starts anyway)"
            ),
            tuple(itertools.islice(changes_that_fit(config), _MOST_CANDIDATES)),
        )


def doubt(config: RunConfig, is_valid: Callable[[RunConfig], bool]) -> str | None:
    """Return a warning, with changes that would help, if a checked run probably exceeds the memory of its
    devices; None if it does not, or if sizes are unknown.

    Args:
        config: the run with its defaults.
        is_valid: returns whether a configuration satisfies all rules.
    """
    moment, gib = fullest_moment(config), device_gib(config["cluster"])
    if moment is None or config["cluster"]["device"] == "cpu" or moment.total <= gib * GIB:
        return None
    changes = (
        change for change in changes_that_fit(config, whole=True) if is_valid(_changed(config, change))
    )
    texts = list[str]()
    for change in itertools.islice(changes, _SHOWN):
        texts.append(" ".join(f"{key}={json.dumps(value)}" for key, value in change.items()))
    fitting = (
        f"it would with {', or '.join(texts)}"
        if texts
        else "train a smaller model, or divide it over more devices"
    )
    assumed = (
        " (assumed; set cluster.device_memory_gib to the real size)"
        if config["cluster"]["device_memory_gib"] is None
        else ""
    )
    return (
        f"a device of {gib:g} GiB{assumed} probably has no room: {moment.name} takes "
        f"{size_text(moment.total)}; {fitting}"
    )


def verdict(config: RunConfig) -> str | None:
    """Return a line that a checked run fits its devices, with its fullest moment; None if sizes are unknown,
    or without a GPU. Call it only if there is no ``doubt``."""
    moment = fullest_moment(config)
    if moment is None or config["cluster"]["device"] == "cpu":
        return None
    gib = device_gib(config["cluster"])
    return f"fits {gib:g} GiB: {size_text(moment.total)} at the fullest moment, {moment.name} (planned)"


# Limit the candidates, because each requires a validation of the whole configuration (``proposals``).
_MOST_CANDIDATES, _SHOWN = 12, 3
_MOST_RANKS_A_NODE, _MOST_NODES = 8, 64


def changes_that_fit(config: RunConfig, *, whole: bool = False) -> Iterator[Mapping[str, object]]:
    """Yield changes of keys with which the memory plan fits the devices: first of one key, then of two keys,
    each with the smallest sufficient change. They may violate rules.

    Args:
        config: a run with its defaults.
        whole: yield only changes with which the complete plan fits; otherwise, changes with which only
            weights, gradients and optimizer state fit follow at the end.
    """
    kinds: list[Sequence[Mapping[str, object]]]
    kinds = list(itertools.starmap(each_of, _remedies(config).items()))
    for both in list(itertools.combinations(kinds, 2)):
        kinds.append([{**one, **other} for one, other in itertools.product(*both)])
    fitting: list[Mapping[str, object]] = []
    state_only: list[Mapping[str, object]] = []
    for kind in kinds:
        first = next((change for change in kind if _fits(_changed(config, change), whole=True)), None)
        # Skip a pair of changes if one of them suffices alone.
        if first is not None and not any(known.items() <= first.items() for known in fitting):
            fitting.append(first)
            yield first
        elif first is None and not whole:
            state_only += [
                change for change in kind if len(change) == 1 and _fits(_changed(config, change), whole=False)
            ][:1]
    yield from state_only


def _changed(config: RunConfig, changes: Mapping[str, object]) -> RunConfig:
    for key, value in changes.items():
        config = put(config, key, value)
    return config


def _fits(config: RunConfig, *, whole: bool) -> bool:
    try:
        moment = fullest_moment(config) if whole else None
        needed = state_bytes(config) if moment is None else moment.total
    except (NotApplicableError, ValueError, ZeroDivisionError):  # sizes that do not divide
        return False
    return needed <= device_gib(config["cluster"]) * GIB


def _remedies(config: RunConfig) -> dict[str, Sequence[object]]:
    """Return, by dotted key, values that reduce memory, the closest to the current value first. Keys that
    cost only speed precede keys that need more devices."""
    policy, cluster, backend = config["policy"], config["cluster"], enabled_backend(config["policy"])
    by_tokens = next(
        (key for key in ("sequence_packing", "dynamic_batching") if policy[key]["enabled"]), None
    )
    longest = policy["max_total_sequence_length"]
    found: dict[str, Sequence[object]] = {}
    if by_tokens is not None:
        budget = f"policy.{by_tokens}.train_mb_tokens"
        found[budget] = _halves(at(config, budget), longest)
    else:
        found["policy.train_micro_batch_size"] = _halves(policy["train_micro_batch_size"], 1)
    if policy["logprob_chunk_size"] is None:
        found["policy.logprob_chunk_size"] = [1024]
    section = {"megatron": "policy.megatron_cfg", "dtensor": "policy.dtensor_cfg"}.get(backend)
    recompute = (
        "policy.activation_checkpointing_enabled"
        if section is None
        else f"{section}.activation_checkpointing"
    )
    if not at(config, recompute):
        found[recompute] = [True]
    generation = generation_of(policy) if generates(config) else None
    if generation is not None:
        # The KV cache of the policy, or of an engine on its backend, is proportional to this.
        found["policy.generation_batch_size"] = _halves(policy["generation_batch_size"], 1)
    share = "policy.generation.vllm_cfg.gpu_memory_utilization"
    if (given := at(config, share)) is not None:
        found[share] = [part for part in (0.7, 0.6, 0.5, 0.4, 0.3) if part < given]
    optimizer = f"{section}.optimizer"
    if backend == "megatron" and at(config, f"{optimizer}.use_distributed_optimizer"):
        for key in MOMENT_KEYS:
            if at(config, f"{optimizer}.{key}") == "float32":
                found[f"{optimizer}.{key}"] = ["bfloat16", "8bit"]
        host = f"{optimizer}.optimizer_offload_fraction"
        found[host] = [part for part in (0.5, 1.0) if part > at(config, host)]
    tensor = {
        "megatron": f"{section}.tensor_model_parallel_size",
        "dtensor": f"{section}.tensor_parallel_size",
    }.get(backend)
    if tensor:
        found[tensor] = _doubles(at(config, tensor), cluster["gpus_per_node"])
    if backend == "megatron":
        experts, stages = f"{section}.expert_model_parallel_size", f"{section}.pipeline_model_parallel_size"
        ranks = cluster["gpus_per_node"] * cluster["num_nodes"]
        found[experts] = _doubles(at(config, experts), ranks)
        found[stages] = _doubles(at(config, stages), ranks)
        distributed = f"{section}.optimizer.use_distributed_optimizer"
        found[distributed] = [] if at(config, distributed) else [True]
    else:
        offload = "policy.fsdp_offload_enabled" if section is None else f"{section}.cpu_offload"
        found[offload] = [] if at(config, offload) else [True]
    if cluster["num_nodes"] == 1:
        found["cluster.gpus_per_node"] = _doubles(cluster["gpus_per_node"], _MOST_RANKS_A_NODE)
    found["cluster.num_nodes"] = _doubles(cluster["num_nodes"], _MOST_NODES)
    # Then the policy itself generates. Engines on separate devices would not end by this key alone.
    is_engine = at(policy, "generation.backend") not in OF_THE_POLICY
    if generation is not None and is_engine and generation["colocated"]["enabled"]:
        found["policy.generation.backend"] = ["megatron" if backend == "megatron" else "hf"]
    return found


def _halves(value: int, least: int) -> list[object]:
    return [value >> power for power in range(1, value.bit_length()) if value >> power >= least]


def _doubles(value: int, most: int) -> list[object]:
    return [value << power for power in range(1, most.bit_length()) if value << power <= most]
