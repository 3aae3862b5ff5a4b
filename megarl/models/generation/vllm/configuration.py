"""vLLM's part of the configuration: defaults, rules and memory estimates. Imports neither torch nor vLLM."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from converters.model_config.architecture import ModelFacts
from megarl.config.adapters import is_named
from megarl.config.arithmetic import divisors_near, each_of, multiples_near
from megarl.config.defaults import fill
from megarl.config.generation import GenerationConfig, VllmConfig
from megarl.config.memory import BYTES
from megarl.config.memory_run import GIB, GRAPHS, device_gib
from megarl.config.nested import put
from megarl.config.parameters import expert_layer_parameters, model_parameters
from megarl.config.plugins import EngineMemory
from megarl.config.rules.generation import LONGEST
from megarl.config.rules.parallel import GENERATION, engines_shape, generation_shape
from megarl.config.rules.view import NotApplicableError, Rule, View
from megarl.config.sections import ClusterConfig, Config, RunConfig
from megarl.errors import Violation
from megarl.key import defaults_of

VLLM = f"{GENERATION}.vllm_cfg"
_SIZES, _SHARES = (2, 4, 8, 16, 32, 64), (0.7, 0.8, 0.9)
_REFIT = "refits send the policy's weights through it"
FIXED_ARGUMENTS = {
    "weight_transfer_config": _REFIT,
    "worker_extension_cls": _REFIT,
    "logprobs_mode": (
        "training scores the tokens after the temperature, and the engine has to score them in the same way"
    ),
    "tokenizer": "stop strings are searched in the texts of the policy's tokenizer",
    "seed": "it is derived from the run's seed",
    "trust_remote_code": "code of a model's author would run in the engine",
    "language_model_only": "the policy is the text part of a vision-language model",
    "distributed_executor_backend": "the run places the ranks of an engine",
}
ONLY_ON_GPUS = {
    "pipeline_parallel_size": (
        "vLLM 0.32 for CPUs fails at the first response of an engine of several stages"
    ),
    "expert_parallel_size": "vLLM 0.32 for CPUs crashes in its expert kernel when experts are divided",
}
"""Keys that must be 1 on a CPU, each with the reason. With larger values, engines start and load their
weights, but fail later."""
KEYS_OF_ARGUMENTS = {
    "model": "model_name",
    "max_model_len": "vllm_cfg.max_model_len",
    "tensor_parallel_size": "vllm_cfg.tensor_parallel_size",
    "pipeline_parallel_size": "vllm_cfg.pipeline_parallel_size",
    "enable_expert_parallel": "vllm_cfg.expert_parallel_size",
    "dtype": "vllm_cfg.precision",
    "load_format": "vllm_cfg.load_format",
    "enable_lora": "vllm_cfg.enable_lora",
    "enforce_eager": "vllm_cfg.enforce_eager",
    "gpu_memory_utilization": "vllm_cfg.gpu_memory_utilization",
    "kv_cache_memory_bytes": "vllm_cfg.kv_cache_gb",
    "enable_sleep_mode": "colocated.enabled",
}
"""Arguments of vLLM that other keys of the section set, with these keys."""
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""LoRA ranks for which vLLM 0.32 allocates memory. Adapters of other ranks are padded with zeros to the next
larger one."""
MAX_NUM_SEQS = 1024
"""Maximum number of responses that an engine samples at a time: the default of vLLM 0.32 on GPUs with at
least 70 GiB. vLLM's sampler allocates 4 bytes per response and vocabulary token, to count tokens."""


def complete_vllm(generation: Mapping[str, Any], engines: Mapping[str, Any] | None = None) -> Config:
    """Return a copy of a ``generation`` section for vLLM with all defaults filled in.

    Args:
        generation: the section.
        engines: defaults for ``vllm_cfg`` that come from the policy.
    """
    filled = fill(
        generation, {"backend": "vllm", **defaults_of(GenerationConfig), "vllm_cfg": {}, "vllm_kwargs": {}}
    )
    if isinstance(filled["vllm_cfg"], dict):
        # Leave anything but a mapping unchanged, so that the type check reports it.
        filled["vllm_cfg"] = fill(filled["vllm_cfg"], {**(engines or {}), **defaults_of(VllmConfig)})
    return filled


def complete(generation: Mapping[str, Any], policy: Mapping[str, Any]) -> Config:
    """Return ``complete_vllm`` of the section, with precision and maximum length of the policy as
    defaults."""
    of_policy = {
        "precision": policy.get("precision"),
        "max_model_len": policy.get("max_total_sequence_length"),
    }
    return complete_vllm(generation, of_policy)


def sized(view: View) -> GenerationConfig:
    """Return the ``policy.generation`` section of a run, with a default for ``vllm_kwargs.max_num_seqs``: the
    number of rows that one engine gets in a training step. More rows, as in a large validation, wait in the
    engine's queue."""
    generation: GenerationConfig = view[GENERATION]
    given, settings = generation.get("vllm_kwargs") or {}, generation["vllm_cfg"]
    if "max_num_seqs" in given:
        return generation
    try:
        nodes, ranks = engines_shape(view)
        algorithm = view.algorithm
        rows = view[algorithm.PROMPTS or "policy.train_global_batch_size"]
        rows *= 1 if algorithm.GENERATIONS is None else view[algorithm.GENERATIONS]
        # Dynamic sampling generates more prompts at a time than a step trains on.
        rows = math.ceil(rows * view.get(f"{algorithm.section()}.batch_multiplier", 1.0))
    except NotApplicableError:
        # A batch size is missing or has the wrong type. Another check reports that.
        return generation
    # At least 1, even for impossible sizes, which engines_are_whole reports.
    engines = max(1, nodes * ranks // (settings["tensor_parallel_size"] * settings["pipeline_parallel_size"]))
    return put(
        generation, "vllm_kwargs", {**given, "max_num_seqs": max(1, min(-(-rows // engines), MAX_NUM_SEQS))}
    )


def memory_of_engine(config: RunConfig, facts: ModelFacts) -> EngineMemory:
    """Return ``engine_memory`` for a validated configuration."""
    return engine_memory(sized(View(config)), config["cluster"], facts)


def engine_memory(generation: GenerationConfig, cluster: ClusterConfig, facts: ModelFacts) -> EngineMemory:
    """Estimate the memory of one device of an engine.

    Args:
        generation: the ``policy.generation`` section for vLLM, with defaults filled in.
        cluster: the ``cluster`` section, with defaults filled in.
        facts: sizes of the model.
    """
    settings = generation["vllm_cfg"]
    tensor, stages, element = (
        settings["tensor_parallel_size"],
        settings["pipeline_parallel_size"],
        BYTES[settings["precision"]],
    )
    layers, device = -(-facts.num_layers // stages), device_gib(cluster)
    budget, share = (
        int(settings["gpu_memory_utilization"] * device * GIB),
        f"{settings['gpu_memory_utilization']:g} of {device:g} GiB",
    )
    parameters = model_parameters(facts, tensor)
    if stages > 1:
        # Assume the stage with the most layers, and one vocabulary matrix: the first and the last stage have
        # one each, even if they are tied.
        vocabulary = facts.vocab_size * facts.hidden_size // tensor
        of_layers = parameters - (1 if facts.tied_embeddings else 2) * vocabulary
        parameters = -(-of_layers * layers // facts.num_layers) + vocabulary
    counters = 4 * (generation.get("vllm_kwargs") or {}).get("max_num_seqs", MAX_NUM_SEQS) * facts.vocab_size
    rest = counters + GRAPHS * (not settings.get("enforce_eager"))
    # Expert and tensor parallelism of experts take the same memory per rank.
    experts = expert_layer_parameters(facts, 1, tensor) * element
    token, net = _cached_width(facts, tensor) * element, facts.gated_delta
    if net is None:
        token *= layers
    else:
        nets = sum(net.layers)
        states = nets * net.state_bytes(element) // (tensor * settings["max_model_len"])
        # Assume that the layers with and without a KV cache are distributed evenly over the stages.
        token = (token * (facts.num_layers - nets) + states) // stages
    weights = parameters * element
    return EngineMemory(weights, budget, token, share, rest, experts, ranks=tensor * stages)


def _cached_width(facts: ModelFacts, tensor: int) -> int:
    """Return how many numbers one rank of an engine caches per token and layer.

    They are the keys and values of the rank's heads. For latent attention they are the latent vector from
    which keys and values are projected; it is replicated on all ranks.
    """
    if facts.latent_attention is not None:
        return facts.latent_attention.kv_lora_rank + facts.latent_attention.qk_rope_head_dim
    return 2 * -(-facts.num_key_value_heads // tensor) * facts.head_dim


def engine_weights_fit(view: View) -> Iterator[Violation]:
    """Yield a violation if the engine's share of a device is too small for its weights, or for the KV cache
    of its longest sequence. Otherwise the engine would fail only after minutes of starting."""
    view.require(view["cluster.device"] != "cpu" and view.has("cluster.device_memory_gib"))
    # Use the max_num_seqs with which the run starts the engine: vLLM's sampler allocates memory for each row.
    facts, generation, cluster = view.facts, sized(view), view["cluster"]
    tensor, share = view[f"{VLLM}.tensor_parallel_size"], view[f"{VLLM}.gpu_memory_utilization"]
    needed = engine_memory(generation, cluster, facts)
    larger = each_of(f"{VLLM}.gpu_memory_utilization", (part for part in _SHARES if part > share))
    if needed.weights < needed.budget:
        longest = view[f"{VLLM}.max_model_len"]
        if needed.cached_tokens < longest and view[f"{VLLM}.kv_cache_gb"] is None:
            bound = (
                f"{needed.weights / GIB:.1f} GiB of weights leave room for keys and values of "
                f"{needed.cached_tokens:,} tokens, but {VLLM}.max_model_len = {longest:,}"
            )
            sizes = each_of(f"{VLLM}.tensor_parallel_size", (size for size in _SIZES if size > tensor))
            fix = f"raise it, or {VLLM}.tensor_parallel_size, or shorten {LONGEST}"
            yield Violation(f"{VLLM}.gpu_memory_utilization", share, bound, fix, (*larger, *sizes))
        return

    def fits(size: int) -> bool:
        divided = engine_memory(put(generation, "vllm_cfg.tensor_parallel_size", size), cluster, facts)
        return facts.num_attention_heads % size == 0 and divided.weights < divided.budget

    bound = (
        f"{needed.weights / GIB:.1f} GiB of weights on each of the engine's devices have no room in "
        f"gpu_memory_utilization = {share:g} of "
        f"cluster.device_memory_gib = {device_gib(cluster):g} GiB"
    )
    sizes = each_of(f"{VLLM}.tensor_parallel_size", (size for size in _SIZES if size > tensor and fits(size)))
    yield Violation(
        f"{VLLM}.tensor_parallel_size",
        tensor,
        bound,
        "give the engine more or larger devices",
        (*sizes, *larger),
    )


def engines_are_whole(view: View) -> Iterator[Violation]:
    """Yield a violation unless a node's ranks can be divided into engines, or an engine fills complete nodes
    whose number divides the number of generation nodes."""
    key, (nodes, ranks) = f"{VLLM}.tensor_parallel_size", engines_shape(view)
    stages = view[f"{VLLM}.pipeline_parallel_size"]
    if view[key] >= 1 and stages >= 1 and not fills_places(view[key] * stages, nodes, ranks):
        times = f" times pipeline_parallel_size = {stages}" if stages > 1 else ""
        fix = f"write sizes whose product divides {ranks}" if stages > 1 else f"write a divisor of {ranks}"
        over = f", or be {ranks} times a divisor of the {nodes} nodes" if nodes > 1 else ""
        bound = f"it{times} must divide the {ranks} ranks that generate on a node{over}"
        candidates = tuple(_whole_engines(view, nodes, ranks))
        yield Violation(
            key, view[key], bound, f"{fix}, or give generation another number of ranks", candidates
        )


def fills_places(size: int, nodes: int, ranks: int) -> bool:
    """Return whether engines of ``size`` ranks fill ``nodes`` nodes of ``ranks`` ranks each, with several
    engines per node or several nodes per engine."""
    return ranks % size == 0 or (size % ranks == 0 and nodes % (size // ranks) == 0)


def _whole_engines(view: View, nodes: int, ranks: int) -> Iterator[Mapping[str, object]]:
    """Yield candidates for a fix: sizes of engines that fill the nodes, and numbers of ranks per node that
    are multiples of the current size."""
    key, stages_key = f"{VLLM}.tensor_parallel_size", f"{VLLM}.pipeline_parallel_size"
    tensor, stages = view[key], view[stages_key]
    if ranks % stages == 0:
        yield from each_of(key, divisors_near(ranks // stages, tensor))
    for over in divisors_near(nodes, 1):
        if over > 1 and ranks * over % stages == 0:
            yield {key: ranks * over // stages}
    for fewer in divisors_near(ranks, stages):
        for size in divisors_near(ranks // fewer, tensor):
            yield {stages_key: fewer, key: size}
    if view["cluster.num_nodes"] == 1 and generation_shape(view) is not None:
        per_node = view["cluster.gpus_per_node"]
        yield from each_of(
            f"{GENERATION}.colocated.resources.gpus_per_node",
            (number for number in multiples_near(tensor * stages, ranks) if number < per_node),
        )


def engines_on_a_cpu_are_divided_by_tensors(view: View) -> Iterator[Violation]:
    """Yield a violation if an engine on a CPU uses a form of parallelism other than tensor parallelism; see
    ``ONLY_ON_GPUS``."""
    view.require(view["cluster.device"] == "cpu")
    for key, reason in ONLY_ON_GPUS.items():
        if view[f"{VLLM}.{key}"] > 1:
            bound, candidates = f"cluster.device is cpu: {reason}", each_of(f"{VLLM}.{key}", [1])
            yield Violation(
                f"{VLLM}.{key}", view[f"{VLLM}.{key}"], bound, "write 1, or remove the line", candidates
            )


def gated_delta_nets_run_in_an_engine(view: View) -> Iterator[Violation]:
    """Yield violations for dtypes, head widths and prefix caching that vLLM's CPU kernels for gated delta
    nets do not support."""
    net = view.facts.gated_delta
    view.require(net is not None and view["cluster.device"] == "cpu")
    assert net is not None
    precision, kwargs = f"{VLLM}.precision", f"{GENERATION}.vllm_kwargs"
    if view[precision] != "bfloat16":
        bound = "vLLM 0.32 for CPUs computes gated delta nets only in bfloat16"
        yield Violation(precision, view[precision], bound, "write bfloat16", each_of(precision, ["bfloat16"]))
    if net.key_width != net.value_width:
        bound = (
            "vLLM 0.32 for CPUs needs values that are as wide as keys (linear_key_head_dim = "
            f"{net.key_width}), and they have {net.value_width}"
        )
        yield Violation(
            "policy.model_name", view["policy.model_name"], bound, f"write megatron in {GENERATION}.backend"
        )
    if view[kwargs].get("enable_prefix_caching", True):
        bound = (
            "vLLM keeps states of prompts only if it reads the prompts in pieces, which resets "
            "the seeds of rows on a CPU"
        )
        yield Violation(kwargs, view[kwargs], bound, "add enable_prefix_caching: false")


def experts_divide_over_an_engine(view: View) -> Iterator[Violation]:
    """Yield a violation unless the expert-parallel size is 1 or the tensor-parallel size: vLLM only has a
    switch for expert parallelism."""
    key, size = f"{VLLM}.expert_parallel_size", view[f"{VLLM}.expert_parallel_size"]
    view.require(size > 1)
    tensor = view[f"{VLLM}.tensor_parallel_size"]
    if size != tensor:
        bound = f"it must be 1 or {VLLM}.tensor_parallel_size = {tensor}"
        yield Violation(key, size, bound, "write one of the two", each_of(key, dict.fromkeys((tensor, 1))))
    elif not view.facts.num_experts:
        yield Violation(key, size, "the model has no experts", "write 1, or remove the line")


def heads_divide_over_an_engine(view: View) -> Iterator[Violation]:
    """Yield a violation unless the tensor-parallel size divides the number of attention heads."""
    key, heads = f"{VLLM}.tensor_parallel_size", view.facts.num_attention_heads
    if view[key] >= 1 and heads % view[key]:
        bound = f"it must divide the {heads} attention heads"
        yield Violation(
            key, view[key], bound, "write a divisor of them", each_of(key, divisors_near(heads, view[key]))
        )


def engine_reaches_length(view: View) -> Iterator[Violation]:
    """Yield a violation if the engine's maximum length is less than the policy's, because responses would be
    truncated."""
    key, longest = f"{VLLM}.max_model_len", view[LONGEST]
    if view[key] < longest:
        yield Violation(
            key,
            view[key],
            f"it must be at least {LONGEST} = {longest}",
            "remove the line, or raise it",
            ({key: longest},),
        )


def fast_sampling_is_of_the_first_runner(view: View) -> Iterator[Violation]:
    """Yield a violation for ``fast_sampling`` with vLLM's V2 model runner, the default on GPUs. There, seeds
    per response cost nothing, so ``fast_sampling`` would not be faster."""
    key, variable = f"{VLLM}.fast_sampling", "VLLM_USE_V2_MODEL_RUNNER"
    view.require(view["cluster.device"] != "cpu" and view[key])
    if str((view[f"{VLLM}.env_vars"] or {}).get(variable)) != "0":
        bound = "vLLM uses its second model runner on a GPU, where one seed for all responses is not faster"
        fix = f'write false, or use the first one by {VLLM}.env_vars: {{{variable}: "0"}}'
        yield Violation(key, True, bound, fix, each_of(key, [False]))


def adapters_go_alone(view: View) -> Iterator[Violation]:
    """Yield violations for ``enable_lora`` if engines would lack the base weights, or cannot serve the
    policy's adapters."""
    key = f"{VLLM}.enable_lora"
    view.require(view[key])
    without = "write false, and engines get full weights"
    if not view.get("policy.peft.enabled", False):
        yield Violation(
            key, True, "policy.peft.enabled is false, so that there are no adapters to send", "write false"
        )
        return
    if view[f"{VLLM}.load_format"] != "auto":
        bound = f"{key} is true, and refits then send only adapters"
        yield Violation(
            f"{VLLM}.load_format",
            view[f"{VLLM}.load_format"],
            bound,
            "write auto: engines read the model from its files",
        )
    if view["policy.peft.dim"] > LORA_RANKS[-1]:
        yield Violation(
            "policy.peft.dim",
            view["policy.peft.dim"],
            f"vLLM computes with ranks up to {LORA_RANKS[-1]} ({key})",
            without,
        )
    if view[f"{VLLM}.pipeline_parallel_size"] > 1:
        yield Violation(
            key, True, "engines of several pipeline stages get full weights in this version", without
        )
    if view.facts.num_experts:
        yield Violation(
            key, True, "engines of a mixture of experts get full weights in this version", without
        )
    for name in ("embed_tokens", "lm_head"):
        if is_named(f"model.{name}", view["policy.peft.target_modules"]):
            bound = f"policy.peft.target_modules names {name}, whose adapter cannot be sent to engines alone"
            yield Violation(key, True, bound, without)
            break
    if view["cluster.device"] != "cpu" and view[f"{GENERATION}.colocated.enabled"]:
        bound = (
            "engines on the policy's GPUs release the model while it trains, and no refit would restore it"
        )
        yield Violation(
            key,
            True,
            bound,
            f"{without}; or {GENERATION}.colocated.enabled: false, with devices of their own",
        )


def engine_arguments_are_free(view: View) -> Iterator[Violation]:
    """Yield a violation for each argument in ``vllm_kwargs`` that megarl itself sets, and for an invalid
    ``max_num_seqs``."""
    key, given = f"{GENERATION}.vllm_kwargs", view[f"{GENERATION}.vllm_kwargs"] or {}
    rows = given.get("max_num_seqs", 1)
    if type(rows) is not int or rows < 1:
        bound = "it must be a whole number, at least 1"
        yield Violation(f"{key}.max_num_seqs", rows, bound, "write a number of responses, or remove the line")
    for name in given:
        if name in FIXED_ARGUMENTS:
            yield Violation(f"{key}.{name}", given[name], FIXED_ARGUMENTS[name], "remove it")
        elif name in KEYS_OF_ARGUMENTS:
            yield Violation(
                f"{key}.{name}",
                given[name],
                "another key sets it",
                f"write {GENERATION}.{KEYS_OF_ARGUMENTS[name]}",
            )


RULES: tuple[Rule, ...] = (
    engine_weights_fit,
    engines_are_whole,
    engines_on_a_cpu_are_divided_by_tensors,
    gated_delta_nets_run_in_an_engine,
    experts_divide_over_an_engine,
    heads_divide_over_an_engine,
    engine_reaches_length,
    fast_sampling_is_of_the_first_runner,
    adapters_go_alone,
    engine_arguments_are_free,
)
