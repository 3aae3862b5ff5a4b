"""Checks of a model on the driver before any worker starts: that its weights can be converted, and that it
has the
data's tokens."""

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
    """Require that the configured backend can run the model, and that its weights exist and fit its config.
    Only headers are read.

    A model with a plain config (``converters.families.plain``) is checked without torch and transformers,
    whose imports take longer than all other checks; every other model, and every refusal by the torch
    backends, needs them.

    Args:
        policy: the ``policy`` section.

    Returns:
        The model's vocabulary size, unpadded.

    Raises:
        ConversionError: the model cannot be converted, or its weights do not fit its config.
        ModelError: its config cannot be read, or does not fit the weights.
        ConfigError: the model cannot be divided as configured.
    """
    directory = locate_source(policy["model_name"])
    size = _check_stored(policy, directory)
    # This module needs torch, without which a dry run is faster.
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
    """Refuse an adapter that does not fit its model, or that contains embeddings of the base and was trained
    next to others.

    Raises:
        ConversionError: with everything that does not fit.
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
    """Check a model as ``check_model`` does, without the network. A directory is checked in full, unless it
    holds no weights at all; otherwise ``config.json`` is, if it is on this disk or known.

    Raises:
        ConversionError, ModelError, ConfigError: as ``check_model``.
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
    """Check the other models of a run as ``check_model`` does. They read the policy's tokens, so each must
    have them under the same ids.

    Args:
        config: of a checked run.
        tokenizer: of the policy.

    Raises:
        ConversionError, ConfigError: as ``check_model``.
        ModelError: as ``check_model``, or a model has another vocabulary.
    """
    for path, kind in model_sections(config).items():
        section = at(config, path)
        with _named(path):
            vocab_size = check_model(section)
        # Check these facts now, because those of a model that had to be fetched were not known before.
        facts = list(map(facts_of_policy, (config[POLICY], section)))
        for fault in backbone_is_that_of_the_policy(path, kind, section["model_name"], *facts):
            raise ConfigError([fault])
        _check_vocabulary(config[POLICY], section, path, vocab_size, tokenizer)


def conflicting_tokens(policy: PolicyConfig, tokenizer: PreTrainedTokenizerBase) -> str | None:
    """Return a description of the tokens that have another id in the model's own tokenizer than in
    ``policy.tokenizer``; None if there are none, or the model has no tokenizer. Tokens that the model's
    tokenizer lacks are no conflict, because their rows may be free."""
    if policy["tokenizer"]["name"] == policy["model_name"]:
        return None
    try:
        # The template is of no interest, but one that is absent would be logged.
        own = get_tokenizer(
            {"name": policy["model_name"], "chat_template": None}, policy["trust_remote_code"]
        ).get_vocab()
    # The model's own tokenizer may be why another one is named, and tokenizers raises bare exceptions.
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
    """Return the ids and tokens of a vocabulary that have another id in another one, or none, by id."""
    return sorted((index, token) for token, index in known.items() if others.get(token) != index)


def check_models_on_disk(config: RunConfig) -> None:
    """Check all models of a checked run as ``check_model_on_disk`` does, with the same errors."""
    check_model_on_disk(config[POLICY])
    for path in model_sections(config):
        with _named(path):
            check_model_on_disk(at(config, path))


@contextlib.contextmanager
def _named(path: str) -> Iterator[None]:
    """Make errors of a model inside the block name its section at ``path`` instead of ``policy``."""
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
    """Refuse a model that would read other tokens than the policy wrote.

    A model brings its own tokenizer. If it has none, only the number of its tokens is compared.

    Raises:
        ModelError: it has another vocabulary.
    """
    known = tokenizer.get_vocab()
    fix = f"give {path}.model_name a model with the tokens of policy.tokenizer"
    if max(known.values()) >= vocab_size:
        raise ModelError(
            f"{path}.model_name = {section['model_name']!r}: its token ids are in [0, "
            f"{vocab_size}), and the policy's tokenizer has {max(known.values())}. Fix: {fix}"
        )
    # By default a section has the policy's tokenizer, which does not show the tokens that the section's model
    # knows.
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
    """Read a ``config.json`` that is plain; return None for any other. A file that cannot be read is refused
    by transformers."""
    try:
        return read_plain(read_json_object(path))
    except (FileNotFoundError, ConversionError):
        return None


def _read_config(policy: PolicyConfig, place: str | Path, **options: Any) -> Any:
    try:
        return read_hf_config(place, trust_remote_code=policy["trust_remote_code"], **options)
    except Exception as error:
        # Model code, the checks of a config's fields and the file system raise errors of many unrelated
        # classes.
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
    """Check a model and return its vocabulary size; without a source only the config is checked.

    Args:
        policy: the ``policy`` section.
        plain: architecture of a plain config.
        read: reads the config with transformers; called if ``plain`` is not enough.
        source: the weights.
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
    # Call it only for its refusals, because the workers make their own settings.
    megatron_settings(architecture)
    if source is not None:
        # Do not compare tied weights, which would have to be read. The worker that holds them compares them.
        check_headers(source, as_stored(architecture, source.names()))
    return architecture.vocab_size


def _architecture_of(policy: PolicyConfig, config: Any) -> Architecture:
    """Return the architecture as Megatron's workers read it; notes on the config for the user are logged."""
    ignored = policy["megatron_cfg"].get("ignore_config_keys") or ()
    architecture = read_architecture(config, ignored)
    for note in config_notes(config, ignored):
        logger.warning("%s: config.json: %s", policy["model_name"], note)
    return architecture


def _runs_on_torch(
    policy: PolicyConfig, architecture: Architecture, source: HuggingFaceSource | None
) -> bool:
    """Return whether a model certainly runs on the torch backends, because its tensors and plan are defined
    here. Any other model has to be built to be checked."""
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
    """Return the vocabulary size of a model that scores."""
    from megarl.models.engine.scoring import scoring_config, scoring_source

    config = scoring_config(config)
    # Only names and shapes are read, for which any seed of a new head suffices.
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
    """Refuse a model that the workers of the torch backends would refuse, by building it without memory."""
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
    """Return the tokens that stand for pictures, of a model that has a vision tower and whose config is on
    this disk."""
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
    """Refuse data with tokens that the model does not have, or that do not stand for text.

    Args:
        dataset: tokenized.
        tokenizer: tokenizer of the data; its padding token goes through the model too.
        vocab_size: token ids are in [0, vocab_size).
        with_answers: True when the answers are part of the model's input.
        pictures: ``tokens_of_pictures``.

    Raises:
        ModelError: the padding token is out of range.
        DataError: a record's token is out of range, or stands for a picture; names the first such record.
    """
    _refuse_pictures(dataset, tokenizer, with_answers, pictures)
    fix = "give policy.tokenizer.name the tokenizer that belongs to policy.model_name"
    pad = tokenizer.pad_token_id
    if not 0 <= pad < vocab_size:
        raise ModelError(
            f"padding token {tokenizer.pad_token!r} = {pad}: token ids of the model are in [0, "
            f"{vocab_size}). Fix: {fix}"
        )
    # The largest token is known without reading the examples, which are read only to name one.
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
