"""Rules on engines, sampling and sequence lengths."""

from __future__ import annotations

from collections.abc import Iterator

from megarl.config.arithmetic import each_of
from megarl.config.asynchrony import NAME as ASYNC
from megarl.config.engines import engine_kind, is_engine, kind_of
from megarl.config.environments import faults_of_ranges
from megarl.config.plugins import REWARD_MODEL
from megarl.config.rules.backends import backend_of
from megarl.config.rules.parallel import FOR_TRAINING, GENERATION
from megarl.config.rules.view import Rule, View, apply_rules
from megarl.config.schema import check_section
from megarl.errors import ConfigError, Violation

LONGEST = "policy.max_total_sequence_length"
PROMPT = "data.max_input_seq_length"
NEW_TOKENS = f"{GENERATION}.max_new_tokens"
BACKENDS = {"megatron": {"megatron"}, "hf": {"fsdp1", "dtensor"}}


def generation_fits_backend(view: View) -> Iterator[Violation]:
    """Require that ``generation.backend``, if it is the policy itself, names the policy's own backend."""
    key = f"{GENERATION}.backend"
    engine = view[key]
    wanted = BACKENDS.get(engine)
    backend = backend_of(view)
    if wanted is not None and backend not in wanted:
        fix = "write megatron" if backend == "megatron" else "write hf"
        yield Violation(
            key,
            engine,
            f"it needs a {' or '.join(sorted(wanted))} policy, and this policy runs on {backend}",
            fix,
        )


def engine_is_known(view: View) -> Iterator[Violation]:
    """Require that ``generation.backend`` is the policy itself, a built-in engine, or the import path of an
    engine."""
    view.require(is_engine(view[GENERATION]))
    try:
        engine_kind(view[f"{GENERATION}.backend"])
    except ConfigError as error:
        yield from error.violations


def engine_takes_its_section(view: View) -> Iterator[Violation]:
    """Require that ``engine_cfg`` has the form that the engine declares, and apply the engine's own rules."""
    backend, key = view[f"{GENERATION}.backend"], f"{GENERATION}.engine_cfg"
    given = view.get(key, {})
    try:
        # `engine_is_known` reports this error.
        kind = kind_of(view[GENERATION])
    except ConfigError:
        return
    if kind is None or kind.section is None:
        if given:
            yield Violation(
                key,
                given,
                f"{GENERATION}.backend is {backend}, which takes no keys in this section",
                "remove it",
            )
        yield from () if kind is None else apply_rules(kind.rules, view)
        return
    faults = check_section(given, kind.section, prefix=key) or list(
        faults_of_ranges(given, kind.section, key)
    )
    yield from faults
    # Skip the engine's rules if there are faults: the view does not know which of these keys have wrong
    # types.
    if not faults:
        yield from apply_rules(kind.rules, view)


def resources_of_generation(view: View) -> Iterator[Violation]:
    """Require that engines on separate devices get some ranks of a single node, or some whole nodes of
    several, and leave others to training."""
    view.require(not view[f"{GENERATION}.colocated.enabled"] and not view.has(FOR_TRAINING))
    per_node, nodes = view["cluster.gpus_per_node"], view["cluster.num_nodes"]
    ranks_key = f"{GENERATION}.colocated.resources.gpus_per_node"
    nodes_key = f"{GENERATION}.colocated.resources.num_nodes"
    ranks, own_nodes = view.get(ranks_key), view.get(nodes_key)
    if nodes == 1:
        if ranks is None or not 0 < ranks < per_node:
            bound = (
                f"on a single node it must be at least 1 and leave some of the {per_node} ranks to training"
            )
            yield Violation(
                ranks_key, ranks, bound, "write a number of ranks", each_of(ranks_key, range(1, per_node))
            )
        if own_nodes not in {None, 1}:
            yield Violation(nodes_key, own_nodes, "there is a single node", "write null")
        return
    if own_nodes is None or not 0 < own_nodes < nodes:
        bound = f"with several nodes it must be at least 1 and leave some of the {nodes} nodes to training"
        yield Violation(
            nodes_key, own_nodes, bound, "write a number of nodes", each_of(nodes_key, range(1, nodes))
        )
    if ranks not in {None, per_node}:
        bound = f"generation takes whole nodes of {per_node} ranks"
        yield Violation(ranks_key, ranks, bound, "write null", each_of(ranks_key, [None]))


def engine_has_the_policy_model(view: View) -> Iterator[Violation]:
    """Require that the engine's model is the policy's, because refits send it the policy's weights."""
    key, model = f"{GENERATION}.model_name", view["policy.model_name"]
    if view[key] != model:
        who = (
            "the engine gets the policy's weights"
            if is_engine(view[GENERATION])
            else "the policy itself generates"
        )
        bound = f"{who}, so it must be policy.model_name = {model}"
        yield Violation(key, view[key], bound, "remove the line, or write ${policy.model_name}")


def prompt_and_answer_fit(view: View) -> Iterator[Violation]:
    """Require that ``max_total_sequence_length`` is at least the maximum prompt plus the maximum response."""
    view.require(view.algorithm.GENERATES)
    longest, prompt, answer = view[LONGEST], view[PROMPT], view[NEW_TOKENS]
    if prompt + answer > longest:
        bound = f"it must hold {PROMPT} = {prompt} and {NEW_TOKENS} = {answer}"
        # Halves also help if the prompt or the response alone fills the sequence.
        halves = {PROMPT: longest // 2, NEW_TOKENS: longest - longest // 2}
        shorter = ({NEW_TOKENS: longest - prompt}, {PROMPT: longest - answer}, halves)
        candidates = ({LONGEST: prompt + answer}, *(each for each in shorter if min(each.values()) >= 1))
        yield Violation(LONGEST, longest, bound, "raise it, or shorten the others", candidates)


def example_fits(view: View) -> Iterator[Violation]:
    """Require, without generation, that ``data.max_input_seq_length`` (prompt and answer) is at most
    ``max_total_sequence_length``."""
    view.require(not view.algorithm.GENERATES)
    length, longest = view[PROMPT], view[LONGEST]
    if length > longest:
        candidates = ({PROMPT: longest}, {LONGEST: length})
        yield Violation(
            PROMPT, length, f"it must be at most {LONGEST} = {longest}", "lower it to that length", candidates
        )


def model_reaches_length(view: View) -> Iterator[Violation]:
    """Require that ``max_total_sequence_length`` is at most the maximum number of positions of the model."""
    # None if the model's config.json has no limit.
    reach = view.facts.max_position
    if reach is not None and view[LONGEST] > reach:
        bound = f"the model supports at most {reach} positions"
        yield Violation(
            LONGEST,
            view[LONGEST],
            bound,
            "lower it to that, and shorten prompts and responses to fit",
            ({LONGEST: reach},),
        )


def stop_strings_say_something(view: View) -> Iterator[Violation]:
    """Refuse an empty stop string. Every text contains it, so each response would end after its first
    token."""
    key = f"{GENERATION}.stop_strings"
    strings = view[key]
    if isinstance(strings, list) and "" in strings:
        yield Violation(
            key, strings, "a stop string has at least one character", "remove the empty one, or write null"
        )


def token_ids_exist(view: View) -> Iterator[Violation]:
    """Require that ``stop_token_ids`` and ``pad_token_id`` are in the vocabulary."""
    size = view.facts.vocab_size
    for key in (f"{GENERATION}.stop_token_ids", f"{GENERATION}.pad_token_id"):
        value = view.get(key)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        wrong = [token for token in ids if not 0 <= token < size]
        if wrong:
            yield Violation(
                key,
                value,
                f"{wrong} is outside the vocabulary of {size} tokens",
                f"write ids from 0 to {size - 1}",
            )


def sampling_beside_training_has_devices(view: View) -> Iterator[Violation]:
    """Refuse asynchronous training with engines on the policy's devices, or with a reward model, which
    scores on these devices while the policy trains."""
    section = f"{view.algorithm.section()}.{ASYNC}"
    view.require(view.get(f"{section}.enabled") is True and view[f"{section}.replay"] is None)
    key = f"{GENERATION}.colocated.enabled"
    if view[key]:
        bound = (
            f"{section}.enabled is true, and on shared devices sampling and training alternate: "
            "responses would be stale without any overlap"
        )
        fix = f"write false, with {GENERATION}.colocated.resources.gpus_per_node, or {section}.enabled: false"
        yield Violation(key, True, bound, fix)
    if view.written(REWARD_MODEL.section):
        bound = (
            f"{section}.enabled is true, and a reward model scores on the devices of the policy, which "
            "trains meanwhile"
        )
        yield Violation(REWARD_MODEL.section, "...", bound, f"remove it, or write {section}.enabled: false")


def groups_are_young_enough(view: View) -> Iterator[Violation]:
    """Require with ``ready_first`` that ``max_trajectory_age_steps`` is at least ``lookahead_steps``,
    because a batch may be as many steps old as batches are sampled ahead."""
    section = f"{view.algorithm.section()}.{ASYNC}"
    view.require(view.get(f"{section}.enabled") is True and view[f"{section}.schedule"] == "ready_first")
    age, ahead = f"{section}.max_trajectory_age_steps", f"{section}.lookahead_steps"
    if view[age] < view[ahead]:
        bound = f"{ahead} = {view[ahead]} batches are sampled ahead, and a batch can be as many steps old"
        yield Violation(age, view[age], bound, f"write {view[ahead]} or more, or fewer {ahead}")


def engine_logprobs_are_not_compared(view: View) -> Iterator[Violation]:
    """Refuse thresholds on the mismatch of engine and policy if ``recompute_logprobs`` is false, because the
    policy's log-probabilities are then unknown."""
    section = f"{view.algorithm.section()}.{ASYNC}"
    view.require(view.get(f"{section}.enabled") is True and not view[f"{section}.recompute_logprobs"])
    for name in ("max_token_mult_prob_error", "seq_logprob_error_threshold"):
        key = f"{view.algorithm.section()}.{name}"
        if view.get(key) is not None:
            bound = (
                f"{section}.recompute_logprobs is false, so there are no log-probabilities to compare "
                "with the engine's"
            )
            yield Violation(key, view[key], bound, f"write null, or {section}.recompute_logprobs: true")


GENERATION_RULES: tuple[Rule, ...] = (
    generation_fits_backend,
    engine_is_known,
    engine_takes_its_section,
    resources_of_generation,
    engine_has_the_policy_model,
    prompt_and_answer_fit,
    example_fits,
    model_reaches_length,
    stop_strings_say_something,
    token_ids_exist,
    sampling_beside_training_has_devices,
    groups_are_young_enough,
    engine_logprobs_are_not_compared,
)
