"""Checks of the models on the driver, before any worker starts: the weights can be converted and run on the
backend, and the data contain only tokens that the model has."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from converters.check import check_headers
from converters.checkpoint.source import HuggingFaceSource, locate_source
from converters.errors import ConversionError
from converters.families.hf_config import make_hf_config, read_hf_config
from converters.families.read import config_notes, read_architecture, read_plain
from converters.files.reading import read_json_object
from converters.model_config.megatron_settings import megatron_settings
from converters.model_config.prediction_layers import as_stored
from converters.model_config.vision import TOKENS
from megarl.config.backend import enabled_backend, scores
from megarl.config.model_facts import config_file, facts_of_policy, published_config, read_model_facts
from megarl.config.models import POLICY, model_sections, renamed, renamed_text
from megarl.config.nested import at
from megarl.config.policy import PolicyConfig
from megarl.config.rules.backends import HAND_WRITTEN_PLANS
from megarl.config.rules.models import backbone_is_that_of_the_policy
from megarl.config.sections import RunConfig
from megarl.data.tokenization import get_tokenizer
from megarl.errors import ConfigError, DataError, ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from converters.model_config.architecture import Architecture
    from megarl.data.datasets import Dataset

logger = logging.getLogger(__name__)


def check_model(policy: PolicyConfig) -> int:
    """Check that the configured backend can run the model, and that its weights exist and match its config.
    Only the headers of the weight files are read.

    A config that ``converters.families.plain`` can read is checked without importing torch and transformers,
    which would take longer than all other checks. Other configs, and models that the torch backends may
    reject, need these imports.

    Args:
        policy: the ``policy`` section.

    Returns:
        The model's vocabulary size, without padding.

    Raises:
        ConversionError: the model cannot be converted, or its weights do not match its config.
        ModelError: the config cannot be read or used.
        ConfigError: the model cannot be divided among the configured ranks.
    """
    directory = locate_source(policy["model_name"])
    size = _check_stored(policy, directory)
    # Every export copies these files. Check now that they can be copied.
    from converters.checkpoint.artifacts import artifacts

    # Every export has copies of these files: refuse now what could not be copied then.
    artifacts(directory)
    return size


def _check_stored(policy: PolicyConfig, directory: Path) -> int:
    source = HuggingFaceSource(directory)
    size = _check(
        policy, _plain_file(directory / "config.json"), lambda: _read_config(policy, directory), source
    )
    if policy["merged_adapter"] is not None:
        _check_adapter(policy)
    return size


def _check_adapter(policy: PolicyConfig) -> None:
    """Check that an adapter matches its base model.

    Raises:
        ConversionError: it does not match, or stores base weights that differ from the model's; the error
            lists all faults.
    """
    from converters.adapters.adapted_source import AdaptedSource
    from megarl.models.engine.model_weights import open_weights

    source = open_weights(policy)
    assert isinstance(source, AdaptedSource)
    source.require_own_base()
    base = source.adapter.source.raw_config.get("base_model_name_or_path")
    logger.info(
        "%s changes %d tensors of the model; it was trained on the base model %s",
        policy["merged_adapter"],
        len(source.adapter.changed),
        base,
    )


def check_model_on_disk(policy: PolicyConfig) -> None:
    """Run the checks of ``check_model`` that need no network. A local directory with weights is checked in
    full. For other models only ``config.json`` is checked, if it is on this disk or shipped with megarl.

    Raises:
        ConversionError, ModelError, ConfigError: as in ``check_model``.
    """
    name = policy["model_name"]
    directory = Path(name).expanduser()
    if directory.is_dir() and any(directory.glob("*.safetensors*")):
        _check_stored(policy, directory)
    elif (published := published_config(name)) is not None:
        _check(policy, read_plain(published), lambda: make_hf_config(published), None)
    elif read_model_facts(name) is not None and (file := config_file(name)) is not None:
        if directory.is_dir():
            logger.warning(
                "%s holds no weights (*.safetensors), so only its config.json was checked; a run needs them",
                directory,
            )
        _check(policy, _plain_file(file), lambda: _read_config(policy, name, local_files_only=True), None)


def check_models_beside(config: RunConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    """Check the run's models other than the policy. They read the policy's token ids, so their vocabularies
    must assign the same ids.

    Args:
        config: checked configuration of a run.
        tokenizer: the policy's tokenizer.

    Raises:
        ConversionError, ConfigError: as in ``check_model``.
        ModelError: as in ``check_model``, or a model has another vocabulary.
    """
    for path, kind in model_sections(config).items():
        section = at(config, path)
        with _named(path):
            vocab_size = check_model(section)
        # A model that had to be downloaded was unknown when the configuration was checked, so repeat that
        # check.
        facts = list(map(facts_of_policy, (config[POLICY], section)))
        for fault in backbone_is_that_of_the_policy(path, kind, section["model_name"], *facts):
            raise ConfigError([fault])
        _check_vocabulary(config[POLICY], section, path, vocab_size, tokenizer)


def conflicting_tokens(policy: PolicyConfig, tokenizer: PreTrainedTokenizerBase) -> str | None:
    """Return a description of the tokens to which ``policy.tokenizer`` and the model's own tokenizer assign
    different ids; None if there are none or the model has no tokenizer.

    Tokens that the model's tokenizer lacks are allowed, because the embedding may have free rows for them.
    """
    if policy["tokenizer"]["name"] == policy["model_name"]:
        return None
    try:
        # Set the template to None, because a missing one would be logged.
        own = get_tokenizer(
            {"name": policy["model_name"], "chat_template": None}, policy["trust_remote_code"]
        ).get_vocab()
    # The model's own tokenizer may be broken, which can be the reason for naming another one. The tokenizers
    # package raises bare exceptions.
    except Exception:
        return None
    known = tokenizer.get_vocab()
    conflicts = _of_other_ids({token: index for token, index in known.items() if token in own}, own)
    if not conflicts:
        return None
    index, token = conflicts[0]
    return (
        f"policy.tokenizer.name = {policy['tokenizer']['name']!r}: {len(conflicts)} of its {len(known)} "
        f"tokens have another id in the tokenizer of policy.model_name = {policy['model_name']!r}, so that "
        f"the model reads other tokens: first {token!r} = {index}, there {own[token]}"
    )


def _of_other_ids(known: Mapping[str, int], others: Mapping[str, int]) -> list[tuple[int, str]]:
    """Return (id, token) pairs of ``known`` that have another id in ``others`` or are missing there, sorted
    by id."""
    return sorted((index, token) for token, index in known.items() if others.get(token) != index)


def check_models_on_disk(config: RunConfig) -> None:
    """Run ``check_model_on_disk`` for all models of a checked run; errors as there."""
    check_model_on_disk(config[POLICY])
    for path in model_sections(config):
        with _named(path):
            check_model_on_disk(at(config, path))


@contextlib.contextmanager
def _named(path: str) -> Iterator[None]:
    """Rewrite errors raised in the block so that they name the section at ``path`` instead of ``policy``."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(
            [renamed(violation, path) for violation in error.violations] or renamed_text(str(error), path)
        ) from error
    except ConversionError as error:
        details = [renamed_text(detail, path) for detail in error.details]
        raise ConversionError(
            f"{path}: {renamed_text(error.what, path)}", renamed_text(error.fix, path), details
        ) from error
    except ModelError as error:
        raise ModelError(f"{path}: {renamed_text(str(error), path)}") from error


def _check_vocabulary(
    policy: PolicyConfig,
    section: PolicyConfig,
    path: str,
    vocab_size: int,
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    """Check that a model assigns the policy's tokens the same ids, so that it reads the text that the policy
    wrote.

    The vocabulary is taken from the model's own tokenizer. If it has none, only the vocabulary size is
    checked.

    Args:
        policy: the ``policy`` section.
        section: the model's section.
        path: dotted key of that section, for messages.
        vocab_size: number of token ids of the model.
        tokenizer: the policy's tokenizer.

    Raises:
        ModelError: the vocabularies differ.
    """
    known = tokenizer.get_vocab()
    fix = f"give {path}.model_name a model with the tokens of policy.tokenizer"
    if max(known.values()) >= vocab_size:
        raise ModelError(
            f"{path}.model_name = {section['model_name']!r}: its token ids are in [0, "
            f"{vocab_size}), and the policy's tokenizer has {max(known.values())}. Fix: {fix}"
        )
    # A section inherits the policy's tokenizer by default. That is not evidence for the model's tokens, so
    # read the tokenizer next to the model's weights.
    names_its_own = section["tokenizer"] != policy["tokenizer"]
    own = section["tokenizer"] if names_its_own else {"name": section["model_name"]}
    if own == {"name": policy["model_name"]}:
        return
    try:
        others = get_tokenizer(own, section["trust_remote_code"]).get_vocab()
    except ModelError:
        if names_its_own:
            raise
        logger.warning(
            "%s.model_name = %s has no tokenizer: its tokens are assumed to be the policy's",
            path,
            section["model_name"],
        )
        return
    different = _of_other_ids(known, others)
    if different:
        index, token = different[0]
        raise ModelError(
            f"{path}.model_name = {section['model_name']!r}: {len(different)} of the {len(known)} "
            "tokens of the policy's tokenizer have another id in this model's tokenizer, or none: "
            f"first {token!r} = {index}, here {others.get(token)}. Fix: {fix}"
        )


def _plain_file(path: Path) -> Architecture | None:
    """Read a ``config.json`` without transformers; return None if its format is not supported or it cannot be
    read. Transformers then reports the error."""
    try:
        return read_plain(read_json_object(path))
    except (FileNotFoundError, ConversionError):
        return None


def _read_config(policy: PolicyConfig, place: str | Path, **options: Any) -> Any:
    try:
        return read_hf_config(place, trust_remote_code=policy["trust_remote_code"], **options)
    except Exception as error:
        # The model's own code, config validation and the file system raise many unrelated classes.
        raise ModelError(
            f"policy.model_name = {policy['model_name']!r}: its config.json cannot be used: "
            f"{type(error).__name__}: {error}. Fix: give the directory of a complete Hugging Face "
            "model; where transformers does not know its kind, one with a config class next to it "
            "(auto_map in config.json) and policy.trust_remote_code=true"
        ) from error


def _check(
    policy: PolicyConfig,
    plain: Architecture | None,
    read: Callable[[], Any],
    source: HuggingFaceSource | None,
) -> int:
    """Check a model, and return its vocabulary size.

    Args:
        policy: the ``policy`` section.
        plain: the architecture, if the config was read without transformers.
        read: reads the config with transformers; called only if ``plain`` is not enough.
        source: the weights; None checks only the config.
    """
    if scores(policy):
        return _check_scoring(policy, read(), source)
    if enabled_backend(policy) != "megatron":
        if plain is not None and _runs_on_torch(policy, plain, source):
            return plain.vocab_size
        config = read()
        _check_for_torch(policy, config, source)
        return int(config.get_text_config().vocab_size)
    architecture = plain or _architecture_of(policy, read())
    # The workers compute their own settings. Call this only to raise the errors early.
    megatron_settings(architecture)
    if source is not None:
        # Comparing tied weights would read them. The worker that loads them does it.
        check_headers(source, as_stored(architecture, source.names()))
    return architecture.vocab_size


def _architecture_of(policy: PolicyConfig, config: Any) -> Architecture:
    """Return the architecture that the Megatron workers will use; log notes on the config for the user."""
    ignored = policy["megatron_cfg"].get("ignore_config_keys") or ()
    architecture = read_architecture(config, ignored)
    for note in config_notes(config, ignored):
        logger.warning("%s: config.json: %s", policy["model_name"], note)
    return architecture


def _runs_on_torch(
    policy: PolicyConfig, architecture: Architecture, source: HuggingFaceSource | None
) -> bool:
    """Return whether the torch backends can certainly run a model: its tensors and parallel plan are defined
    in this code base. False means unknown; the model has to be built to find out."""
    settings = policy.get("dtensor_cfg")
    own_plan = settings and settings["enabled"] and settings["custom_parallel_plan"] is not None
    if architecture.family not in HAND_WRITTEN_PLANS or architecture.head is not None or own_plan:
        return False
    try:
        if source is not None:
            check_headers(source, architecture)
    except ConversionError:
        return False
    return True


def _check_scoring(policy: PolicyConfig, config: Any, source: HuggingFaceSource | None) -> int:
    """Check a reward or value model, and return its vocabulary size."""
    from megarl.models.engine.scoring import scoring_config, scoring_source

    config = scoring_config(config)
    # Any seed will do for a new head, because only names and shapes are read.
    weights = None if source is None else scoring_source(HuggingFaceSource(source.directory), config, seed=0)
    if enabled_backend(policy) != "megatron":
        _check_for_torch(policy, config, weights)
        return int(config.get_text_config().vocab_size)
    architecture = _architecture_of(policy, config)
    megatron_settings(replace(architecture, head=None))
    if weights is not None:
        check_headers(weights, as_stored(architecture, weights.names()))
    return architecture.vocab_size


def _check_for_torch(policy: PolicyConfig, config: Any, source: HuggingFaceSource | None) -> None:
    """Build a model on the meta device to raise the errors that the workers of the torch backends would
    raise."""
    from megarl.models.dtensor.plans import choose_plan
    from megarl.models.huggingface.loading import build_on_meta, check_names, is_tied

    model = build_on_meta(config, scores=scores(policy), trust_remote_code=policy["trust_remote_code"])
    settings = policy.get("dtensor_cfg")
    if settings and settings["enabled"] and settings["tensor_parallel_size"] > 1:
        choose_plan(
            model, sequence_parallel=settings["sequence_parallel"], custom=settings["custom_parallel_plan"]
        )
    if source is not None:
        check_names(
            source,
            {name: tuple(parameter.shape) for name, parameter in model.named_parameters()},
            tied=is_tied(model),
        )


def tokens_of_pictures(policy: PolicyConfig) -> frozenset[int]:
    """Return the image token ids of a vision model whose config is on this disk; empty for other models."""
    file = config_file(policy["model_name"])
    content = {} if file is None else read_json_object(file)
    found = map(content.get, TOKENS) if "vision_config" in content else ()
    return frozenset(token for token in found if isinstance(token, int))


def check_tokens(
    dataset: Dataset,
    tokenizer: PreTrainedTokenizerBase,
    vocab_size: int,
    with_answers: bool,
    pictures: Collection[int] = (),
) -> None:
    """Check that all tokens of a data set are in the model's vocabulary and are text tokens.

    Args:
        dataset: tokenized records.
        tokenizer: tokenizer of the data; its padding token is checked too.
        vocab_size: number of token ids of the model.
        with_answers: the answers are part of the model's input.
        pictures: image token ids, from ``tokens_of_pictures``.

    Raises:
        ModelError: the padding token is out of range.
        DataError: a token is out of range or an image token; names the first such record.
    """
    _refuse_pictures(dataset, tokenizer, with_answers, pictures)
    fix = "give policy.tokenizer.name the tokenizer that belongs to policy.model_name"
    pad = tokenizer.pad_token_id
    if not 0 <= pad < vocab_size:
        raise ModelError(
            f"padding token {tokenizer.pad_token!r} = {pad}: token ids of the model are in [0, "
            f"{vocab_size}). Fix: {fix}"
        )
    # The largest token id is cached, so records are read only to name one in the error.
    if dataset.examples.largest_token(with_answers) < vocab_size:
        return
    for example in dataset.examples:
        ids = example.prompt_ids + (example.answer_ids if with_answers else ())
        if ids and max(ids) >= vocab_size:
            record, token = example.index, tokenizer.convert_ids_to_tokens(max(ids))
            raise DataError(
                f"record {record} (counted from 0) has token id {max(ids)} ({token!r}): token ids "
                f"of the model are in [0, {vocab_size}). Fix: {fix}"
            )


def _refuse_pictures(
    dataset: Dataset, tokenizer: PreTrainedTokenizerBase, with_answers: bool, pictures: Collection[int]
) -> None:
    found = dataset.examples.first_with(pictures, with_answers) if pictures else None
    if found is not None:
        example, token = found
        raise DataError(
            f"record {example.index} (counted from 0) has token id {token} "
            f"({tokenizer.convert_ids_to_tokens(token)!r}), which stands for an image, or begins "
            "or ends one: megarl trains only the text part of a vision model. Fix: leave out "
            "records with images, and remove such tokens from texts"
        )
