"""vLLM's part of the configuration: defaults, rules, and the memory of a device. Loads neither torch nor vLLM."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from megarl.config.defaults import fill
from megarl.config.memory import BYTES, cached_width
from megarl.config.memory_run import GIB, EngineMemory, model_parameters
from megarl.config.model_facts import ModelFacts
from megarl.config.rules.generation import LONGEST
from megarl.config.rules.parallel import GENERATION, generation_shape, training_shape
from megarl.config.rules.view import Rule, View
from megarl.config.sections import Config
from megarl.errors import Violation
from megarl.key import defaults_of
from megarl.models.generation.interfaces import GenerationConfig, VllmConfig

VLLM = f"{GENERATION}.vllm_cfg"
_REFIT = "the policy's weights come by it"
FIXED_ARGUMENTS = {
    "weight_transfer_config": _REFIT,
    "worker_extension_cls": _REFIT,
    "logprobs_mode": "training scores the tokens after the temperature, and what generates has to score them alike",
    "tokenizer": "stop strings are looked for in the texts of the policy's",
    "seed": "it is drawn from the run's",
    "trust_remote_code": "code of a model's author would run in the engine",
    "distributed_executor_backend": "the places of an engine's ranks are the run's",
    "enable_prefix_caching": "a prefix that was computed with older weights would be used after a refit",
}
KEYS_OF_ARGUMENTS = {
    "model": "model_name",
    "max_model_len": "vllm_cfg.max_model_len",
    "tensor_parallel_size": "vllm_cfg.tensor_parallel_size",
    "dtype": "vllm_cfg.precision",
    "load_format": "vllm_cfg.load_format",
    "enforce_eager": "vllm_cfg.enforce_eager",
    "gpu_memory_utilization": "vllm_cfg.gpu_memory_utilization",
    "kv_cache_memory_bytes": "vllm_cfg.kv_cache_gb",
    "enable_sleep_mode": "colocated.enabled",
}
"""Arguments of vLLM that other keys of the section give."""


def complete_vllm(generation: Mapping[str, Any], engines: Mapping[str, Any] | None = None) -> Config:
    """A copy of a ``generation`` section for vLLM with every absent optional key filled in.

    Args:
        generation: the section.
        engines: what the engines take of the policy unless ``vllm_cfg`` says otherwise.
    """
    filled = fill(generation, {"backend": "vllm", **defaults_of(GenerationConfig), "vllm_cfg": {}, "vllm_kwargs": {}})
    if isinstance(filled["vllm_cfg"], dict):
        filled["vllm_cfg"] = fill(filled["vllm_cfg"], {**(engines or {}), **defaults_of(VllmConfig)})
    return filled


def complete(generation: Mapping[str, Any], policy: Mapping[str, Any]) -> Config:
    """``complete_vllm`` for the engines of a policy."""
    of_policy = {"precision": policy.get("precision"), "max_model_len": policy.get("max_total_sequence_length")}
    return complete_vllm(generation, of_policy)


def engine_memory(generation: Mapping[str, Any], cluster: Mapping[str, Any], facts: ModelFacts) -> EngineMemory:
    """Memory of a device of an engine.

    Args:
        generation: a filled-in ``policy.generation`` section on vLLM.
        cluster: a filled-in ``cluster`` section.
        facts: sizes of the model.
    """
    settings = generation["vllm_cfg"]
    tensor, element = settings["tensor_parallel_size"], BYTES[settings["precision"]]
    heads = -(-facts.num_key_value_heads // tensor)
    budget = int(settings["gpu_memory_utilization"] * cluster["device_memory_gib"] * GIB)
    share = f"{settings['gpu_memory_utilization']:g} of {cluster['device_memory_gib']:g} GiB"
    return EngineMemory(model_parameters(facts, tensor) * element, budget, facts.num_layers * heads * cached_width(facts) * element, share)


def engine_weights_fit(view: View) -> Iterator[Violation]:
    """The engine's weights have room in its share of a device; without that, engines would fail after minutes of starting."""
    view.require(view["cluster.device"] != "cpu")
    facts, generation = view.facts, view[GENERATION]
    cluster = {"device_memory_gib": view["cluster.device_memory_gib"]}
    tensor, share = view[f"{VLLM}.tensor_parallel_size"], view[f"{VLLM}.gpu_memory_utilization"]
    needed = engine_memory(generation, cluster, facts)
    if needed.weights < needed.budget:
        return

    def fits(size: int) -> bool:
        divided = engine_memory({**generation, "vllm_cfg": {**generation["vllm_cfg"], "tensor_parallel_size": size}}, cluster, facts)
        return facts.num_attention_heads % size == 0 and divided.weights < divided.budget

    bound = (
        f"{needed.weights / GIB:.1f} GiB of weights on each of the engine's devices have no room in gpu_memory_utilization = {share:g} of "
        f"cluster.device_memory_gib = {cluster['device_memory_gib']:g} GiB"
    )
    enough = next((size for size in (1, 2, 4, 8, 16, 32, 64) if size > tensor and fits(size)), None)
    fix = "give the engine more of larger devices" if enough is None else f"write {enough}, or give the engine more of larger devices"
    yield Violation(f"{VLLM}.tensor_parallel_size", tensor, bound, fix)


def engines_are_whole(view: View) -> Iterator[Violation]:
    """An engine's ranks are on one node, and the ranks of a node make whole engines."""
    key, ranks = f"{VLLM}.tensor_parallel_size", (generation_shape(view) or training_shape(view))[1]
    if view[key] >= 1 and ranks % view[key]:
        fix = f"write a divisor of {ranks}, or give generation another number of ranks"
        yield Violation(key, view[key], f"it must divide the {ranks} ranks that generate on a node", fix)


def heads_divide_over_an_engine(view: View) -> Iterator[Violation]:
    """Each rank of an engine has the same number of attention heads."""
    key, heads = f"{VLLM}.tensor_parallel_size", view.facts.num_attention_heads
    if view[key] >= 1 and heads % view[key]:
        yield Violation(key, view[key], f"it must divide the {heads} attention heads", f"write a divisor of {heads}")


def engine_reaches_length(view: View) -> Iterator[Violation]:
    """The engine takes any sequence that the policy does, or answers would be cut short."""
    key, longest = f"{VLLM}.max_model_len", view[LONGEST]
    if view[key] < longest:
        yield Violation(key, view[key], f"it must be at least {LONGEST} = {longest}", "remove the line, or raise it")


def changes_go_to_engines_apart(view: View) -> Iterator[Violation]:
    """On the policy's devices the weights are handed over where they lie, whole."""
    view.require(view[f"{GENERATION}.colocated.enabled"])
    key = f"{VLLM}.refit_delta_share"
    if view[key] > 0:
        yield Violation(
            key, view[key], "colocated.enabled is true, and only engines apart are sent changes", "remove the line, or write 0.0"
        )


def engine_arguments_are_free(view: View) -> Iterator[Violation]:
    """What ``vllm_kwargs`` adds is not what megarl gives an engine itself."""
    key, given = f"{GENERATION}.vllm_kwargs", view[f"{GENERATION}.vllm_kwargs"] or {}
    for name in given:
        if name in FIXED_ARGUMENTS:
            yield Violation(f"{key}.{name}", given[name], FIXED_ARGUMENTS[name], "remove it")
        elif name in KEYS_OF_ARGUMENTS:
            yield Violation(f"{key}.{name}", given[name], "another key decides on it", f"write {GENERATION}.{KEYS_OF_ARGUMENTS[name]}")


RULES: tuple[Rule, ...] = (
    engine_weights_fit,
    engines_are_whole,
    heads_divide_over_an_engine,
    engine_reaches_length,
    changes_go_to_engines_apart,
    engine_arguments_are_free,
)
