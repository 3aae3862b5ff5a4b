"""Check that weights and config belong together, before anything is loaded: the number of layers and experts
is plausible, every parameter of the model is stored, and every stored tensor belongs to a parameter."""

from __future__ import annotations

import fnmatch
import itertools
import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from converters.checkpoint.source import HuggingFaceSource
from converters.checkpoint.work import row_ranges
from converters.errors import ConversionError
from converters.mapping.formulas import formula_of
from converters.mapping.rule import Rule
from converters.mapping.rules import all_rules, hf_tensors
from converters.model_config.architecture import Architecture
from converters.model_config.prediction_layers import copies
from converters.torch_dist.keys import is_of_optimizer

if TYPE_CHECKING:
    from converters.mapping.logical import MegatronModel

_HEAD = "lm_head.weight"
# Old Llama checkpoints store the rotary frequencies, although every model computes them from its config.
_IGNORABLE = re.compile(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq")
# Words that wrappers of a model insert into tensor names.
_WRAPPERS = {
    "_orig_mod": "torch.compile",
    "module": "DistributedDataParallel or DeepSpeed",
    "_fsdp_wrapped_module": "FSDP",
    "_checkpoint_wrapped_module": "activation checkpointing",
    "_forward_module": "Lightning Fabric",
    "base_model": "PEFT",
    "base_layer": "PEFT with an adapter that is not merged",
    "default": "PEFT in memory (the name of the adapter)",
    "language_model": "a vision-language model",
    "model": "a wrapper around the model",
}
# Prefixes that all names lack if only an inner part of the model was saved.
_FRONTS = {
    "model.": "AutoModel, whose models have no output layer",
    "base_model.model.": "a model inside PEFT's",
}
# An explanation must fit at least this share of the unexpected names. Some names may be unknown for other
# reasons.
_LEAST_SHARE = 0.5
_DTYPES = frozenset({"torch.float32", "torch.bfloat16", "torch.float16", "torch.float64"})


def check_source(
    source: HuggingFaceSource,
    architecture: Architecture,
    compare_tied: bool = True,
    excused: Sequence[str] = (),
) -> None:
    """Check that a checkpoint has exactly the tensors of an architecture, with the right shapes.

    Tensors that are stored twice must be equal: ``lm_head.weight`` of a tied model (transformers unties the
    two if they differ), and embedding and output layer in multi-token-prediction layers. Only these are read,
    in chunks of 32 MiB.

    Args:
        source: the checkpoint.
        architecture: architecture that the config describes.
        compare_tied: compare tensors that are stored twice.
        excused: patterns (``*`` and ``?``) of tensor names that may be missing or unknown.

    Raises:
        ConversionError: lists missing and unknown tensors, wrong shapes and unsupported dtypes.
    """
    check_headers(source, architecture, excused)
    problems = []
    for name, original in repeated_tensors(architecture).items() if compare_tied else ():
        if name not in source or is_excused([name], excused) or _equal(source, original, name):
            continue
        if name == _HEAD:
            problems.append(
                f"{name} differs from {original}, but tie_word_embeddings is true: set it to false to keep "
                "both"
            )
        else:
            problems.append(
                f"{name} differs from {original}, which Megatron-Core's prediction layers share with the "
                "model"
            )
    _refuse(source, architecture, problems)


def check_headers(source: HuggingFaceSource, architecture: Architecture, excused: Sequence[str] = ()) -> None:
    """Check names, shapes and dtypes like ``check_source``, without comparing values. Reads only headers, and
    does not import torch."""
    source.check_files()
    # Names of stored tensors that the architecture uses; the others are reported as unexpected.
    accounted: set[str] = set()
    problems: list[str] = []

    def compare(name: str, shape: tuple[int, ...]) -> None:
        found, dtype = source.shape(name), source.dtype_name(name)
        if found != shape:
            formula = formula_of(name, shape, architecture)
            problems.append(f"shape: {name} is {list(found)}, config.json asks for {list(shape)} = {formula}")
        if dtype not in _DTYPES:
            problems.append(f"dtype: {name} is {dtype}; quantised weights have to be dequantised first")

    for tensor in hf_tensors(architecture):
        places = [place for place in tensor.places if place.name in source]
        usual = tensor.places[0]
        # Report a missing stack once, not for each of its experts.
        if not places and usual.name not in accounted and not is_excused([tensor.name, usual.name], excused):
            accounted.update([] if tensor.alone else [usual.name])
            problems.append(f"missing: {usual.name} {list(usual.shape)}")
        if len(places) > 1:
            problems.append(f"stored more than once: {', '.join(place.name for place in places)}")
        for place in places:
            # A stacked tensor contains those of many experts; report its faults once.
            if place.name not in accounted:
                accounted.add(place.name)
                compare(place.name, place.shape)
    for name in source.names():
        if name in accounted or _IGNORABLE.fullmatch(name) or is_excused([name], excused):
            continue
        if name in repeated_tensors(architecture):
            compare(name, (architecture.vocab_size, architecture.hidden_size))
        else:
            problems.append(f"unknown: {name} {list(source.shape(name))}")
    _refuse(source, architecture, problems)


def _refuse(source: HuggingFaceSource, architecture: Architecture, problems: list[str]) -> None:
    if not problems:
        return
    expected: set[str] = set()
    for tensor in hf_tensors(architecture):
        expected.update(place.name for place in tensor.places)
    wrapped = wrapped_names(source.names(), expected)
    if wrapped is not None:
        raise ConversionError(
            f"the tensors in {source.directory} have names with {wrapped[0]}, as {wrapped[1]} gives them "
            "(such as "
            f"{next(name for name in source.names() if name not in expected)})",
            "save the model inside the wrapper with its save_pretrained, or rename the tensors",
        )
    # A save with fewer shards leaves files of an earlier save behind.
    stale = source.unread_files()
    if stale:
        problems.append(f"not read, since no index names them: {', '.join(stale)} (left by an earlier save?)")
    raise ConversionError(
        f"the weights in {source.directory} do not fit their config.json ({architecture.family})",
        "use the config.json that belongs to these weights, and complete weights",
        problems,
    )


def wrapped_names(stored: Collection[str], expected: Iterable[str]) -> tuple[str, str] | None:
    """Find out whether a wrapper of the model has changed the tensor names.

    Args:
        stored: names of the stored tensors.
        expected: names that the architecture needs.

    Returns:
        The added or missing part of the names and the wrapper that causes it; None if no wrapper explains the
            names.
    """
    wanted = set(expected)
    missing = wanted - set(stored)
    # An unmerged adapter stores its factors next to the weights.
    wants_factors = any(".lora_" in name for name in wanted)
    strange = [name for name in stored if name not in wanted and (wants_factors or ".lora_" not in name)]
    if not strange:
        return None
    # An inner module that was saved without its outer one has names that lack this prefix.
    for front, who in _FRONTS.items():
        if sum(front + name in missing for name in strange) >= _LEAST_SHARE * len(strange):
            return f"no {front} in front", who
    for words in _candidates(strange, missing):
        if sum(_without(name, words) in missing for name in strange) >= _LEAST_SHARE * len(strange):
            return f"{'.'.join(words)}. in them", _WRAPPERS.get(words[0], "a wrapper")
    return None


def _candidates(stored: Collection[str], wanted: set[str]) -> Iterable[tuple[str, ...]]:
    """Yield words to remove from names: those of known wrappers, then the prefixes of some well-known
    tensors."""
    # Most expected names contain ``model``. It therefore counts as a wrapper only as a prefix, below.
    for word in _WRAPPERS:
        if word != "model":
            yield (word,)
    fronts = set[str]()
    for each in ("model.norm.weight", "model.embed_tokens.weight"):
        fronts.update(name.removesuffix(each) for name in stored if name.endswith(f".{each}"))
    for front in sorted(fronts):
        yield tuple(front.rstrip(".").split("."))


def _without(name: str, words: tuple[str, ...]) -> str:
    """Remove words from a name: a single word anywhere, several words as a prefix."""
    if len(words) == 1:
        return ".".join(part for part in name.split(".") if part != words[0])
    return name.removeprefix(".".join(words) + ".")


def repeated_tensors(architecture: Architecture) -> dict[str, str]:
    """Return name of a copy -> name of the original, for tensors that a checkpoint may store a second
    time."""
    embedding = hf_tensors(architecture)[0].name
    return ({_HEAD: embedding} if architecture.tied_embeddings else {}) | dict(copies(architecture))


def stored_twice(
    source: HuggingFaceSource, architecture: Architecture, excused: Sequence[str] = ()
) -> dict[str, str]:
    """Return name of a copy -> name of the original, for tensors that this checkpoint stores a second time:
    the output layer of a tied model, and embedding and output layer in multi-token-prediction layers. An
    ``excused`` copy counts only if it equals its original."""
    return {
        name: original
        for name, original in repeated_tensors(architecture).items()
        if name in source and (not is_excused([name], excused) or _equal(source, original, name))
    }


def is_excused(names: Sequence[str], patterns: Sequence[str]) -> bool:
    """Return whether one of the names matches one of the patterns (``*`` and ``?``)."""
    return any(fnmatch.filter(names, pattern) for pattern in patterns)


def _equal(source: HuggingFaceSource, first: str, second: str) -> bool:
    """Return whether two matrices have the same bits, in bounded memory."""
    # Import torch here: its import takes seconds, and headers are checked without it.
    import torch

    if (
        first not in source
        or source.dtype(first) != source.dtype(second)
        or source.shape(first) != source.shape(second)
    ):
        return False
    for start, stop in row_ranges(source.shape(first), source.dtype(first).itemsize):
        # Compare bytes rather than numbers: a NaN then equals itself, and -0 differs from 0.
        one, other = (source.read(name, (slice(start, stop),)).view(torch.uint8) for name in (first, second))
        if not torch.equal(one, other):
            return False
    return True


# Trainers store these keys next to the parameters.
_IGNORED_KEYS = ("rng_state", "opt_param_scheduler", "rerun_state_machine")


def account(model: MegatronModel, excused: tuple[str, ...] = ()) -> tuple[list[Rule], tuple[str, ...]]:
    """Match the keys of a ``torch_dist`` checkpoint with the rules. Return the rules whose parameters are
    stored, and the excused keys that no rule needs.

    Raises:
        ConversionError: keys are missing or unknown (lists all), or a key has another shape.
    """
    rules, asked, problems = [], set(), []
    for rule in all_rules(model.architecture):
        key = model.place(rule).key
        asked.add(key)
        if model.has(rule):
            rules.append(rule)
        elif not is_excused((key, rule.megatron_name, *rule.hf_names), excused):
            problems.append(
                f"missing: {key}" + (f" of {rule.megatron_name}" if key in model.checkpoint else "")
            )
    left_out = []
    for key in model.checkpoint:
        # Optimizer, random and scheduler state is not part of the model.
        if key in asked or is_of_optimizer(key) or key.startswith(_IGNORED_KEYS):
            continue
        if is_excused((key,), excused):
            left_out.append(key)
        else:
            problems.append(f"unknown: {key} {list(model.checkpoint.shape(key))}")
    if problems:
        raise ConversionError(
            f"{model.checkpoint.directory} does not hold the {model.architecture.family} model of its config",
            (
                "use the config that belongs to these weights, or --allow-missing PATTERN for keys that "
                "need no "
                "counterpart"
            ),
            # Report a missing key that stacks layers once, not once per layer.
            list(dict.fromkeys(problems)),
        )
    return rules, tuple(left_out)


def check_plausible(
    architecture: Architecture, shapes: Mapping[str, tuple[int, ...]], what: str, *, stacked: bool
) -> None:
    """Reject a config with more layers or experts than the stored tensors can contain. This bounds the work
    before the architecture is expanded into rules.

    A layer is a tensor of its own, or an index of the first dimension of a tensor that stacks layers. An
    expert is a tensor of its own, or an index of a dimension of a layer's tensor.

    Args:
        architecture: architecture that the config describes.
        shapes: name -> shape of all stored tensors.
        what: name of the checkpoint in the error message.
        stacked: layers may be stacked.

    Raises:
        ConversionError: there are too few tensors.
    """
    inside = [
        shape for name, shape in shapes.items() if ".layers." in name and not is_of_optimizer(name) and shape
    ]
    count = len(shapes)
    layers = architecture.num_layers + architecture.prediction_layers
    experts = architecture.mixture.num_experts if architecture.mixture is not None else 1
    most_layers = max([count, *(shape[0] for shape in inside)]) if stacked else count
    most_experts = max([count, *itertools.chain(*inside)])
    # Upper bound on the number of (layer, expert) pairs: a stacked tensor holds at most one for each index of
    # its first two axes, since an expert may be a single row of a layer's tensor.
    places = count + sum(math.prod(shape[:2]) for shape in inside)
    if layers > most_layers or experts > most_experts or layers * experts > places:
        counted = f"{layers} layers" + (f" of {experts} experts" if architecture.mixture is not None else "")
        raise ConversionError(
            f"config.json asks for {counted}, which the {count} tensors of {what} cannot hold",
            "use the config.json that belongs to these weights, and complete weights",
        )
