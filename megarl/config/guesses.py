"""Which key a user meant by one that does not exist."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator

from megarl.config.algorithms import ALGORITHMS

_CLOSE = 0.75
# Words that users and other trainers write -> words in the names of keys.
_SYNONYMS = {
    "tp": "tensor_parallel_size",
    "pp": "pipeline_parallel_size",
    "cp": "context_parallel_size",
    "ep": "expert_model_parallel_size",
    "batch": "global_batch",
    "bf16": "precision",
    "coef": "penalty",
    "dtype": "precision",
    "engine": "backend",
    "etp": "expert_tensor_parallel_size",
    "eval": "val",
    "fp16": "precision",
    "freq": "period",
    "interval": "period",
    "lora": "peft",
    "memory": "device_memory",
    "r": "dim",
    "rank": "dim",
    "sp": "sequence_parallel",
    "vpp": "virtual_pipeline_model_parallel_size",
}
# Whole names -> names, or words in them.
_NAMES = {
    "beta": "kl_coef",
    "kl": "kl_coef",
    "learning_rate": "lr",
    "mbs": "train_micro_batch_size",
    "micro_batch_size": "train_micro_batch_size",
}
# The same, of names without a section, as of options. Without these, names that a subsection of an engine or
# of the profiler happens to have would come first.
_ALONE = {
    "epochs": "max_num_epochs",
    "steps": "max_num_steps",
    "tp": "tensor_model_parallel_size",
    "tensor_parallel_size": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "pipeline_parallel_size": "pipeline_model_parallel_size",
    "cp": "context_parallel_size",
}
_NUMBER = {"num", "n", "number"}
# In each section these mean something else.
_COMMON = {"dir", "enabled", "name", "path", "type"}


def nearest(path: str, known: Iterable[str], own: str = "") -> str | None:
    """Return the allowed dotted path that the user most likely meant by an unknown one, or None.

    A key of the same section that contains all words of the unknown one is preferred, such as ``num_nodes``
    for ``nodes``. Otherwise it is one whose last part is close: one of the same section, one with the same
    last part (first in the section ``own``), or the most similar one. Without a section, a key with the same
    last part goes first. Sections of other algorithms than ``own`` are left out.
    """
    others = {*ALGORITHMS} - {own, _top(path)} if own else set[str]()
    names = {each: each.rpartition(".")[2] for each in known if _top(each) not in others}
    parent, _, last = path.rpartition(".")
    last = _NAMES.get(last) or (last if parent else _ALONE.get(last, last))
    return next(_with_words(path, last, names), None) or _written_alike(path, last, names, own)


def _top(path: str) -> str:
    return path.partition(".")[0]


def _fits(word: str, name: str) -> bool:
    """Return whether a part of a name begins with a word."""
    return any(part == word or (len(word) > 2 and part.startswith(word)) for part in name.split("_"))


def _with_words(path: str, last: str, names: dict[str, str]) -> Iterator[str]:
    """Yield the keys that have all words of a guess, the likeliest first.

    Args:
        path: the guess.
        last: its last part, or the name that it stands for.
        names: the last part of each allowed path.
    """
    parent = path.rpartition(".")[0]
    words = "_".join(_SYNONYMS.get(word, word) for word in last.split("_")).split("_")
    # An option such as --nodes has no section, so any will do, but not instead of a key of that very name.
    may_be_anywhere = not parent and last not in names.values()
    fitting = []
    for other, name in names.items():
        is_near = other.rpartition(".")[0] == parent if parent else may_be_anywhere
        if is_near and all(_fits(word, name) for word in words):
            # num_generations is rather num_generations_per_prompt than val_num_generations_per_prompt.
            fitting.append((not name.startswith(words[0]), name.count("_"), other.count("."), other))
    # By the numbers alone: of equal ones the first in the schema goes first.
    yield from (other for *_, other in sorted(fitting, key=lambda each: each[:3]))
    yield from (other for other in names if other.replace(".", "_") == path.replace(".", "_"))
    if len(words) > 1 and words[0] in _NUMBER and (parent or may_be_anywhere):
        for other, name in names.items():
            # num_gpus is gpus_per_node.
            if name.split("_")[: len(words) - 1] == words[1:] and other.startswith(parent and f"{parent}."):
                yield other


def _written_alike(path: str, last: str, names: dict[str, str], own: str) -> str | None:
    """Return the key whose last part is written most like that of a guess. The arguments are those of
    ``nearest`` and ``_with_words``."""
    parent, top = path.rpartition(".")[0], _top(path)
    # Few mistype the first letter, and eps is not steps.
    alike = {name for name in names.values() if name[:1] == last[:1]}
    close = difflib.get_close_matches(last, alike, n=5, cutoff=_CLOSE)
    is_section = parent != "" and any(other.startswith(f"{top}.") for other in names)

    def likeness(other: str) -> tuple[bool, bool, bool, bool, float]:
        ratio = difflib.SequenceMatcher(None, other, path).ratio()
        is_sibling = parent != "" and other.rpartition(".")[0] == parent
        is_megatrons = not parent and ".megatron_cfg." in other
        return is_sibling, names[other] == last, _top(other) == own, is_megatrons, ratio

    meant = []
    for other, name in names.items():
        # In another section only that very name is meant.
        if name in close and (not is_section or _top(other) == top or (name == last and name not in _COMMON)):
            meant.append(other)
    return max(meant, key=likeness, default=None)
