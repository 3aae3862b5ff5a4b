"""Wrappers that have left their mark in the names of stored tensors."""

from __future__ import annotations

from collections.abc import Collection, Iterable

_WRAPPERS = {
    "_orig_mod": "torch.compile",
    "module": "DistributedDataParallel or DeepSpeed",
    "_fsdp_wrapped_module": "FSDP",
    "_checkpoint_wrapped_module": "activation checkpointing",
    "_forward_module": "Lightning Fabric",
    "base_model": "PEFT",
    "language_model": "a model that sees",
    "model": "a wrapper of the whole model",
}
_LEAST_SHARE = 0.5


def wrapped_names(stored: Collection[str], expected: Iterable[str]) -> tuple[str, str] | None:
    """Return what stands in the stored names that does not belong there and who puts it there; None where nothing explains them.

    Args:
        stored: names of the tensors of a checkpoint.
        expected: names that the architecture asks for.
    """
    wanted = set(expected)
    if not stored or sum(name in wanted for name in stored) >= _LEAST_SHARE * len(stored):
        return None
    bare = {name.removeprefix("model.") for name in wanted}
    if sum(name in bare for name in stored) >= _LEAST_SHARE * len(stored):
        return "no model. in front", "AutoModel, whose models have no output layer"
    for words in _candidates(stored, wanted):
        if sum(_without(name, words) in wanted for name in stored) >= _LEAST_SHARE * len(stored):
            return f"{'.'.join(words)}. in them", _WRAPPERS.get(words[0], "a wrapper")
    return None


def _candidates(stored: Collection[str], wanted: set[str]) -> Iterable[tuple[str, ...]]:
    """Words that may have to be taken out of the names: those of wrappers, then whatever stands in front of an expected name."""
    yield from ((word,) for word in _WRAPPERS if word != "model")
    fronts = {
        name[: -len(each)] for name in stored for each in ("model.norm.weight", "model.embed_tokens.weight") if name.endswith(f".{each}")
    }
    yield from (tuple(front.rstrip(".").split(".")) for front in sorted(fronts))


def _without(name: str, words: tuple[str, ...]) -> str:
    """A name without the words, in front of it or, for a single word, wherever it stands."""
    if len(words) == 1:
        return ".".join(part for part in name.split(".") if part != words[0])
    return name.removeprefix(".".join(words) + ".")
