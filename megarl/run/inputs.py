"""Read and check everything that a run needs before it starts workers: tokenizer, model files, environment
and data."""

from __future__ import annotations

import datetime
import hashlib
import logging
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megarl import env
from megarl.config.algorithms import algorithm_class, generates, step_size
from megarl.config.environments import TOOLS, named_environments
from megarl.config.nested import at
from megarl.config.policy import PolicyConfig
from megarl.config.sections import RunConfig
from megarl.config.validation_sets import set_name, validation_sources
from megarl.data.chat_template import reads_clock, shows_tools
from megarl.data.datasets import Dataset, Example, Reading, load_dataset
from megarl.data.stop_tokens import describe_stop_tokens, stop_tokens_of
from megarl.data.tokenization import get_tokenizer
from megarl.errors import ConfigError, DataError, ModelError, Violation
from megarl.import_path import is_import_path, pickled_object
from megarl.models.generation import configure_generation_config
from megarl.observe.progress import phase
from megarl.rollout.environment import Environment
from megarl.rollout.environments import find_faults, make_environment, tools_told
from megarl.run.model_check import (
    check_model,
    check_models_beside,
    check_tokens,
    conflicting_tokens,
    tokens_of_pictures,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from megarl.config.data_sources import DataSource

logger = logging.getLogger(__name__)

_SHOWN, _SHOWN_OF_RECORD = 60, 1200


@dataclass(frozen=True, slots=True)
class Inputs:
    """Everything that a run has read.

    Attributes:
        tokenizer: the policy's tokenizer.
        environment: scores responses; None for an algorithm that does not generate.
        train: training data.
        validation: validation data; None if there are none.
    """

    tokenizer: PreTrainedTokenizerBase
    environment: Environment | None
    train: Dataset
    validation: Dataset | None


def tokenizer_of(policy: PolicyConfig) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a policy section; by default its model's tokenizer."""
    return get_tokenizer(
        policy.get("tokenizer") or {"name": policy["model_name"]}, policy["trust_remote_code"]
    )


def read_inputs(config: RunConfig, stack: ExitStack) -> Inputs:
    """Read tokenizer, environment and data, and check the model's files against them. The tokenizer's stop
    and padding tokens are added to ``policy.generation``.

    Args:
        config: checked configuration with its defaults; changed in place.
        stack: closes the environment.

    Raises:
        MegarlError: data, model, tokenizer or environment are invalid.
        ConversionError: the model cannot be converted.
    """
    with phase("tokenizer and model read"):
        tokenizer, environment, load = _opened(config, stack)
        check_models_beside(config, tokenizer)
        conflicts = conflicting_tokens(config["policy"], tokenizer)
        if conflicts is not None:
            # Only warn, because training can teach the model new tokens.
            logger.warning("%s", conflicts)
    data = config["data"]
    train = load(data["train"])
    validation = _load_validation(config, load) if data["validation"] else None
    _warn_of_small_sources(train, step_size(config)[0])
    return Inputs(tokenizer, environment, train, validation)


def read_validation(
    config: RunConfig, stack: ExitStack, *, of_checkpoint: bool = False
) -> tuple[PreTrainedTokenizerBase, Environment | None, Dataset]:
    """Read tokenizer, environment and validation data for an evaluation; checks and errors as in
    ``read_inputs``.

    A tokenizer that conflicts with the model's own is an error here, unless a checkpoint is evaluated, whose
    training may have taught the model these tokens.

    Args:
        config: checked configuration with its defaults; changed in place.
        stack: closes the environment.
        of_checkpoint: the weights come from a checkpoint of a run.
    """
    tokenizer, environment, load = _opened(config, stack)
    conflicts = conflicting_tokens(config["policy"], tokenizer)
    if conflicts is not None and not of_checkpoint:
        raise ModelError(
            f"{conflicts}. Fix: add policy.tokenizer.name={config['policy']['model_name']} "
            "policy.generation.stop_token_ids=null, and remove policy.generation.pad_token_id if it is given"
        )
    return tokenizer, environment, _load_validation(config, load)


_Load = Callable[["DataSource | Sequence[DataSource]"], Dataset]


def _load_validation(config: RunConfig, load: _Load) -> Dataset:
    """Load the validation data. Loading may detect the format of a known data set, so store each set's
    configured name first, to keep its metrics' names."""
    sources = validation_sources(config)
    names = list(map(set_name, sources))
    dataset = load(sources)
    for source, name in zip(sources, names, strict=True):
        if set_name(source) != name and generates(config):
            source["val_set"] = name
    return dataset


def _opened(config: RunConfig, stack: ExitStack) -> tuple[PreTrainedTokenizerBase, Environment | None, _Load]:
    """Check the model, and return the tokenizer, the environment, and a function that loads data sources with
    them."""
    policy, data = config["policy"], config["data"]
    tokenizer = tokenizer_of(policy)
    if policy["generation"] is not None:
        policy["generation"] = configure_generation_config(
            policy["generation"], tokenizer, model_name=policy["model_name"]
        )
    # Read the stop tokens that the model's files declare even if the configuration sets others, because an
    # export contains these files.
    named_stops = stop_tokens_of(tokenizer, policy["model_name"])
    vocab_size, pictures = check_model(policy), tokens_of_pictures(policy)
    environment = _environment(config, stack)
    with_answers = environment is None
    fault_of_answer = None if environment is None else find_faults(environment, config["env"]["timeout_s"])

    template_kwargs = policy["tokenizer"].get("chat_template_kwargs")
    stops = tuple(at(policy, "generation.stop_token_ids") or named_stops)
    sections = at(config, "env") or {}
    names = bool(named_environments(sections))
    pairs = algorithm_class(config["algorithm"]).PAIRS
    tools = tools_told(environment)
    if any(tools.values()) and at(config, "env.environment") != TOOLS and not shows_tools(tokenizer):
        logger.warning(
            "the chat template does not show the policy the tools of the environment: describe in "
            "the prompts the tools and the form of a call"
        )
    if (at(config, f"{algorithm_class(config['algorithm']).section()}.max_rollout_turns") or 1) > 1:
        _check_observations(policy, tokenizer, stops, with_tools=any(tools.values()))
    reading = Reading(
        data,
        tokenizer,
        with_answers,
        fault_of_answer,
        _judge(config),
        template_kwargs,
        names,
        pairs,
        stops,
        _template_date(policy, tokenizer),
        tools,
    )

    def load(sources: DataSource | Sequence[DataSource]) -> Dataset:
        dataset = load_dataset(sources, reading)
        check_tokens(dataset, tokenizer, vocab_size, with_answers, pictures)
        return dataset

    return tokenizer, environment, load


def _check_observations(
    policy: PolicyConfig, tokenizer: PreTrainedTokenizerBase, stops: Sequence[int], *, with_tools: bool
) -> None:
    """Check that the chat template renders an environment's messages. Log if it renders a response
    differently in later turns, since such a conversation is then split into several training rows.

    Raises:
        DataError: it does not render a role's message.
    """
    from megarl.rollout.collector import observation_encoder

    encoder = observation_encoder(policy, tokenizer, stops)
    for role in ("user", "tool") if with_tools else ("user",):
        encoder.check_role(role)
    if encoder.rewritten is not None:
        logger.info(
            "the chat template writes an earlier response differently once a user's turn follows: "
            "%s. There the conversation continues as another segment, with its own training row "
            "(train/segments)",
            encoder.rewritten,
        )


def _template_date(policy: PolicyConfig, tokenizer: PreTrainedTokenizerBase) -> datetime.date | None:
    """Return the date that a chat template prints, and store it in the configuration; None if the template
    prints no date.

    Raises:
        ConfigError: the configured date is invalid, or the template does not use it.
    """
    section, key = policy["tokenizer"], "policy.tokenizer.template_date"
    given = section.get("template_date")
    if not reads_clock(str(tokenizer.chat_template)):
        if given is not None:
            bound = "the chat template does not read the date, so it would do nothing"
            raise ConfigError([Violation(key, given, bound, "remove it")])
        return None
    if given is None:
        # The configuration is saved with the run, so a launch on a later day renders the same prompts.
        section["template_date"] = given = datetime.date.today().isoformat()
        logger.info("the chat template writes the date; this run keeps the day of its first start, %s", given)
    try:
        return datetime.date.fromisoformat(given)
    except ValueError:
        raise ConfigError(
            [Violation(key, given, "it is not a date", "write year, month and day, such as 2026-11-27")]
        ) from None


def _environment(config: RunConfig, stack: ExitStack) -> Environment | None:
    """Build the environment of an algorithm that generates; the stack closes it."""
    if not generates(config):
        return None
    environment = make_environment(config["env"])
    stack.callback(environment.close)
    return environment


def _judge(config: RunConfig) -> list[Any]:
    """Return everything on which the check of a reference answer depends, as a cache key: the ``env``
    section, the user's reward code, and the versions of the packages that score."""
    section = config.get("env") or {}
    sources, objects = [], []
    for text in _texts_in(section):
        if is_import_path(text):
            place = text.rpartition(":")[0]
            # The environment has been built, so that the modules that it names have been imported.
            file = Path(getattr(sys.modules.get(place), "__file__", None) or place).expanduser()
            if file.is_file():
                sources.append(file.read_bytes())
        pickled = pickled_object(text)
        if pickled is not None:
            objects.append(pickled)
    code = [hashlib.blake2b(text, digest_size=16).hexdigest() for text in sources + objects]
    # Include both versions, because another version of either package may score the same answer differently.
    return [section, code, env.installed_version(env.DISTRIBUTION), env.installed_version("math-verify")]


def _texts_in(value: Any) -> Iterator[str]:
    """Yield all strings in a nested section."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | list):
        for inner in value.values() if isinstance(value, Mapping) else value:
            yield from _texts_in(inner)


def require_a_step_of_records(train: Dataset, config: RunConfig) -> None:
    """Reject training data with fewer records than one step takes. Records multiplied by ``repeat`` count
    each time, because the user asked for repeated records.

    Raises:
        DataError: a step would contain a record several times.
    """
    per_step, records = step_size(config)[0], len(train)
    if records >= per_step:
        return
    key = algorithm_class(config["algorithm"]).PROMPTS or "policy.train_global_batch_size"
    found = ", ".join(f"{source.name}: {source.end - source.start:,}" for source in train.sources)
    left_out = (
        ", without those that data.filter_overlong_prompts leaves out"
        if config["data"]["filter_overlong_prompts"]
        else ""
    )
    fix = f"write {key}={records} or less, or give more records"
    if not any(source.weight is not None for source in train.sources):
        fix += (
            "; if a step may use a record several times, give the source repeat: "
            f"{math.ceil(per_step / records)}"
        )
    raise DataError(
        f"data.train has {records} records ({found}{left_out}), and a step takes {key} = "
        f"{per_step}, so it would use some of them several times. Fix: {fix}"
    )


def _warn_of_small_sources(train: Dataset, per_step: int) -> None:
    """Warn about weighted sources from which a step takes more records than they have."""
    total = sum(source.weight or 0.0 for source in train.sources)
    for source in train.sources if len(train.sources) > 1 else ():
        records, share = source.end - source.start, (source.weight or 0.0) / total if total else 0.0
        if share * per_step > records:
            logger.warning(
                "%s has %d records, and by its weight a step takes %.1f of them, so it uses some "
                "several times",
                source.name,
                records,
                share * per_step,
            )


def describe_inputs(config: RunConfig) -> list[str]:
    """Read everything as a run would, and return a description, one line per item. Errors as in
    ``read_inputs``."""
    with ExitStack() as stack:
        inputs = read_inputs(config, stack)
        require_a_step_of_records(inputs.train, config)
        tokenizer, with_answers = inputs.tokenizer, inputs.environment is None
        template = str(tokenizer.chat_template).replace("\n", " ")
        lines = [
            f"tokenizer: {type(tokenizer).__name__}, {len(tokenizer)} tokens, pads with "
            f"{tokenizer.pad_token!r}, ends with "
            f"{tokenizer.eos_token!r}",
            f"responses end with: {_stops_in_words(config['policy'], tokenizer)}",
            f"chat template: {template if len(template) <= _SHOWN else template[:_SHOWN] + '...'}",
            _of_dataset("data.train", inputs.train, with_answers),
            f"first record: {_first_record(inputs.train.examples[0], tokenizer, with_answers)}",
        ]
        if inputs.validation is not None:
            lines.append(_of_dataset("data.validation", inputs.validation, with_answers))
        return lines


def _first_record(example: Example, tokenizer: PreTrainedTokenizerBase, with_answers: bool) -> str:
    """Return the text of a tokenized record on one line, with special tokens. With ``with_answers``, the
    spans that have a loss are in ``[[brackets]]``."""
    ids, learned = list(example.prompt_ids), list[tuple[int, int]]()
    if with_answers:
        ids += example.answer_ids
        learned = list(example.targets or [(len(example.prompt_ids), len(ids))])
    text, done = "", 0
    for start, end in learned:
        text += f"{tokenizer.decode(ids[done:start])}[[{tokenizer.decode(ids[start:end])}]]"
        done = end
    text = (text + tokenizer.decode(ids[done:])).replace("\n", "\\n")
    return (
        text
        if len(text) <= _SHOWN_OF_RECORD
        else f"{text[: _SHOWN_OF_RECORD // 2]} ... {text[-_SHOWN_OF_RECORD // 2 :]}"
    )


def _stops_in_words(policy: PolicyConfig, tokenizer: PreTrainedTokenizerBase) -> str:
    own = at(policy, "generation.stop_token_ids")
    known = stop_tokens_of(tokenizer, policy["model_name"])
    if own is None or list(known) == list(own):
        return describe_stop_tokens(tokenizer, policy["model_name"])
    return f"{', '.join(map(repr, tokenizer.convert_ids_to_tokens(own)))} (policy.generation.stop_token_ids)"


def _of_dataset(key: str, dataset: Dataset, with_answers: bool) -> str:
    prompts = dataset.examples.lengths(with_answers=False)
    records = f"{len(dataset):,} {'records' if dataset.of_record == 1 else 'pairs'}"
    text = (
        f"{key}: {records}; prompts of {prompts.min()} to {prompts.max()} tokens, {prompts.mean():.1f} "
        "on average"
    )
    if len(dataset.sources) > 1:
        text += "; " + ", ".join(
            f"{source.name}: {source.end - source.start:,}" for source in dataset.sources
        )
    if not with_answers:
        return text
    return f"{text}; with their answers at most {dataset.examples.lengths(with_answers=True).max()}"
