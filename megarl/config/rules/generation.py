"""Rules on generation and on the lengths of sequences."""

from __future__ import annotations

from collections.abc import Iterator

from megarl.config.memory_run import GIB, engine_memory
from megarl.config.rules.backends import backend_of
from megarl.config.rules.parallel import FOR_TRAINING, GENERATION, generation_shape, training_shape
from megarl.config.rules.view import Rule, View
from megarl.errors import Violation

VLLM = f"{GENERATION}.vllm_cfg"
LONGEST = "policy.max_total_sequence_length"
_REFIT = "the policy's weights come by it"
FIXED_ARGUMENTS = {
    "weight_transfer_config": _REFIT,
    "worker_extension_cls": _REFIT,
    "logprobs_mode": "training scores the tokens after the temperature, and what generates has to score them alike",
    "enable_prefix_caching": "a prefix that was computed with older weights would be used after a refit",
}
BACKENDS = {"megatron": {"megatron"}, "hf": {"fsdp1", "dtensor"}}


def generation_fits_backend(view: View) -> Iterator[Violation]:
    """An engine inside the policy generates with that policy's backend."""
    key = f"{GENERATION}.backend"
    engine = view[key]
    wanted = BACKENDS.get(engine)
    backend = backend_of(view)
    if wanted is not None and backend not in wanted:
        fix = "write megatron" if backend == "megatron" else "write hf"
        yield Violation(key, engine, f"it generates with a {' or '.join(sorted(wanted))} policy, and this policy runs on {backend}", fix)


def megatron_generates_in_place(view: View) -> Iterator[Violation]:
    """The Megatron engine, and plain transformers, are the training policy itself."""
    key, engine = f"{GENERATION}.colocated.enabled", view[f"{GENERATION}.backend"]
    if engine in BACKENDS and not view[key]:
        yield Violation(key, False, f"the {engine} backend generates on the training ranks", "set it to true")


def resources_of_generation(view: View) -> Iterator[Violation]:
    """An engine of its own gets a part of a single node, or whole nodes of several."""
    view.require(not view[f"{GENERATION}.colocated.enabled"] and not view.has(FOR_TRAINING))
    per_node, nodes = view["cluster.gpus_per_node"], view["cluster.num_nodes"]
    ranks_key, nodes_key = (f"{GENERATION}.colocated.resources.{key}" for key in ("gpus_per_node", "num_nodes"))
    ranks, own_nodes = view.get(ranks_key), view.get(nodes_key)
    if nodes == 1:
        if ranks is None or not 0 < ranks < per_node:
            bound = f"on a single node it must be at least 1 and leave some of the {per_node} ranks to training"
            yield Violation(ranks_key, ranks, bound, "write a number of ranks")
        if own_nodes not in {None, 1}:
            yield Violation(nodes_key, own_nodes, "there is a single node", "write null")
        return
    if own_nodes is None or not 0 < own_nodes < nodes:
        bound = f"with several nodes it must be at least 1 and leave some of the {nodes} nodes to training"
        yield Violation(nodes_key, own_nodes, bound, "write a number of nodes")
    if ranks not in {None, per_node}:
        yield Violation(ranks_key, ranks, f"generation takes whole nodes of {per_node} ranks", "write null")


def engine_has_the_policy_model(view: View) -> Iterator[Violation]:
    """What generates has the policy's weights, so that it must be the same model."""
    key, model = f"{GENERATION}.model_name", view["policy.model_name"]
    if view[key] != model:
        who = "the engine gets the policy's weights" if _on_vllm(view) else "the policy itself generates"
        bound = f"{who}, so it must be policy.model_name = {model}"
        yield Violation(key, view[key], bound, "remove the line, or write ${policy.model_name}")


def engine_weights_fit(view: View) -> Iterator[Violation]:
    """The engine's weights have room in its share of a device; without that, engines would fail after minutes of starting."""
    view.require(_on_vllm(view) and view["cluster.device"] != "cpu")
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


def shared_devices_need_no_resources(view: View) -> Iterator[Violation]:
    """Only an engine of its own has devices of its own."""
    view.require(view[f"{GENERATION}.colocated.enabled"])
    for name in ("gpus_per_node", "num_nodes"):
        key = f"{GENERATION}.colocated.resources.{name}"
        if view.get(key) is not None:
            bound = "colocated.enabled is true: generation runs on the devices of training, so it would do nothing"
            yield Violation(key, view[key], bound, "write null, or remove the line")


def examples_are_scored_by_the_model_itself(view: View) -> Iterator[Violation]:
    """SFT raises the probability of its examples, which nobody has drawn."""
    view.require(not view.algorithm.GENERATES)
    for name, neutral in (("temperature", 1.0), ("top_p", 1.0), ("top_k", None)):
        value = view[f"{GENERATION}.{name}"]
        if value != neutral:
            bound = "SFT trains the model's own probabilities, and log-probabilities follow how answers are drawn"
            yield Violation(f"{GENERATION}.{name}", value, bound, f"write {'null' if neutral is None else neutral}, or remove the section")


def engines_are_whole(view: View) -> Iterator[Violation]:
    """An engine's ranks are on one node, and the ranks of a node make whole engines."""
    view.require(_on_vllm(view))
    key, ranks = f"{VLLM}.tensor_parallel_size", (generation_shape(view) or training_shape(view))[1]
    if view[key] >= 1 and ranks % view[key]:
        fix = f"write a divisor of {ranks}, or give generation another number of ranks"
        yield Violation(key, view[key], f"it must divide the {ranks} ranks that generate on a node", fix)


def heads_divide_over_an_engine(view: View) -> Iterator[Violation]:
    """Each rank of an engine has the same number of attention heads."""
    view.require(_on_vllm(view))
    key, heads = f"{VLLM}.tensor_parallel_size", view.facts.num_attention_heads
    if view[key] >= 1 and heads % view[key]:
        yield Violation(key, view[key], f"it must divide the {heads} attention heads", f"write a divisor of {heads}")


def engine_reaches_length(view: View) -> Iterator[Violation]:
    """The engine takes any sequence that the policy does, or answers would be cut short."""
    view.require(_on_vllm(view))
    key, longest = f"{VLLM}.max_model_len", view[LONGEST]
    if view[key] < longest:
        yield Violation(key, view[key], f"it must be at least {LONGEST} = {longest}", "remove the line, or raise it")


def changes_go_to_engines_apart(view: View) -> Iterator[Violation]:
    """On the policy's devices the weights are handed over where they lie, whole."""
    view.require(_on_vllm(view) and view[f"{GENERATION}.colocated.enabled"])
    key = f"{VLLM}.refit_delta_share"
    if view[key] > 0:
        yield Violation(
            key, view[key], "colocated.enabled is true, and only engines apart are sent changes", "remove the line, or write 0.0"
        )


def engines_stay_the_policy_s(view: View) -> Iterator[Violation]:
    """Of vLLM's arguments some are what refits and log-probabilities rest on."""
    view.require(_on_vllm(view))
    key, given = f"{GENERATION}.vllm_kwargs", view[f"{GENERATION}.vllm_kwargs"] or {}
    for name, why in FIXED_ARGUMENTS.items():
        if name in given:
            yield Violation(f"{key}.{name}", given[name], why, "remove it")


def _on_vllm(view: View) -> bool:
    return bool(view[f"{GENERATION}.backend"] == "vllm")


def prompt_and_answer_fit(view: View) -> Iterator[Violation]:
    """The longest prompt and the longest answer fit into a sequence."""
    view.require(view.algorithm.GENERATES)
    longest, prompt, answer = view[LONGEST], view["data.max_input_seq_length"], view[f"{GENERATION}.max_new_tokens"]
    if prompt + answer > longest:
        bound = f"it must hold data.max_input_seq_length = {prompt} and {GENERATION}.max_new_tokens = {answer}"
        yield Violation(LONGEST, longest, bound, f"write {prompt + answer}, or shorten the others")


def example_fits(view: View) -> Iterator[Violation]:
    """The longest SFT example fits into a sequence."""
    view.require(not view.algorithm.GENERATES)
    key = "data.max_input_seq_length"
    if view[key] > view[LONGEST]:
        yield Violation(key, view[key], f"it must be at most {LONGEST} = {view[LONGEST]}", f"write {view[LONGEST]}")


def model_reaches_length(view: View) -> Iterator[Violation]:
    """The model was made for sequences of that length."""
    reach = view.facts.max_position
    if reach is not None and view[LONGEST] > reach:
        yield Violation(LONGEST, view[LONGEST], f"the model was made for at most {reach} positions", f"write {reach} or less")


def stop_strings_say_something(view: View) -> Iterator[Violation]:
    """Every text contains the empty one, so that each answer would end after its first token."""
    key = f"{GENERATION}.stop_strings"
    strings = view[key]
    if isinstance(strings, list) and "" in strings:
        yield Violation(key, strings, "a stop string has at least one character", "leave the empty one out, or write null")


def token_ids_exist(view: View) -> Iterator[Violation]:
    """Token ids named in the configuration are in the vocabulary."""
    size = view.facts.vocab_size
    for key in (f"{GENERATION}.stop_token_ids", f"{GENERATION}.pad_token_id"):
        value = view.get(key)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        wrong = [token for token in ids if not 0 <= token < size]
        if wrong:
            yield Violation(key, value, f"{wrong} is outside the vocabulary of {size} tokens", f"write ids from 0 to {size - 1}")


GENERATION_RULES: tuple[Rule, ...] = (
    generation_fits_backend,
    megatron_generates_in_place,
    resources_of_generation,
    engine_has_the_policy_model,
    engine_weights_fit,
    shared_devices_need_no_resources,
    examples_are_scored_by_the_model_itself,
    engines_are_whole,
    heads_divide_over_an_engine,
    engine_reaches_length,
    changes_go_to_engines_apart,
    engines_stay_the_policy_s,
    prompt_and_answer_fit,
    example_fits,
    model_reaches_length,
    stop_strings_say_something,
    token_ids_exist,
)
