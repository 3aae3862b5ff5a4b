"""Data sources in the configuration: their schema, built-in data sets, and keys that name fields of
records."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal, NotRequired, cast

from typing_extensions import TypedDict

from megarl.key import ABOVE_0, AT_LEAST_0, AT_LEAST_1, POSITIVE_SHARE, Key

NAMED_SETS: Mapping[str, str] = MappingProxyType(
    {
        "gsm8k": "megarl.data.sets.gsm8k",
        "DAPOMath17K": "megarl.data.sets.dapo_math",
        "DAPOMathAIME2024": "megarl.data.sets.dapo_aime_2024",
        "AIME2024": "megarl.data.sets.aime_2024",
        "AIME2025": "megarl.data.sets.aime_2025",
        "AIME2026": "megarl.data.sets.aime_2026",
        "DeepScaler": "megarl.data.sets.deepscaler",
        "OpenMathInstruct-2": "megarl.data.sets.openmathinstruct_2",
        "HotpotQA": "megarl.data.sets.hotpot_qa",
    }
)
"""Name of each built-in data set -> module that knows its fields. Names are NeMo-RL's where it has the
set."""

FILE_SUFFIXES = frozenset({".jsonl", ".json", ".ndjson", ".parquet", ".csv", ".tsv"})
"""Suffixes by which a path counts as a file, which has neither subsets nor splits."""

DEFAULT_CACHE_GIB = 100.0
"""Default of ``data.cache_gib``: maximum GiB of tokenized records cached for later starts."""

FIELD_KEYS = ("prompt_key", "answer_key", "messages_key", "tools_key", "system_key")
PAIR_KEYS = ("chosen_key", "rejected_key")
PLACE_KEYS = ("path", "name")
# Keys of a source that describe the data at its ``path`` or ``name``; they are not inherited when that is
# overridden.
_OF_ONE_PLACE = frozenset({*PLACE_KEYS, "subset", "split", *FIELD_KEYS, *PAIR_KEYS, "extra_keys"})

_STEP = re.compile(r"(?:(?:^|\.)([^.\[\]]+))|\[(-?\d+)\]")


class DataSource(TypedDict):
    """Set of records (``path`` or ``name``), and the names of its fields.

    A field key may reach into objects and lists: `reward_model.ground_truth`, `prompt[0].content`.
    """

    path: NotRequired[
        Annotated[
            str,
            Key(
                "a file (``.parquet``, ``.csv``, ``.tsv``, anything else with one JSON object per line), a "
                "directory of such files, or a directory of a data set saved by ``datasets``."
            ),
        ]
    ]
    name: NotRequired[
        Annotated[
            str,
            Key(
                "a data set of the ``datasets`` library, by Hugging Face id or local directory, or a data "
                "set listed in configs/README.md. A listed one needs no field keys, and is read from "
                "``path`` if that is set as well.",
            ),
        ]
    ]
    subset: NotRequired[
        Annotated[
            str | None,
            Key("configuration (subset) of the data set ``name``; the library's default when absent."),
        ]
    ]
    split: NotRequired[Annotated[str, Key("split of the data set ``name`` (default `train`).")]]
    prompt_key: NotRequired[
        Annotated[
            str | list[str],
            Key(
                "field with the prompt: text, a number, or a list of messages; several fields are joined by "
                "blank lines. When absent, this key and the answer's key are inferred from common column "
                "names. ``[]`` (SFT only) means no prompt: all tokens of ``answer_key`` are trained on, "
                "without the chat template."
            ),
        ]
    ]
    answer_key: NotRequired[
        Annotated[
            str | list[str],
            Key(
                "field with the reference answer: text, a number, or the tests of a program; several fields "
                "become one JSON object, for example tests and the code that sets them up."
            ),
        ]
    ]
    messages_key: NotRequired[
        Annotated[
            str,
            Key(
                "field with a whole conversation. Its last assistant turn is the reference answer, and "
                "everything before it the prompt. SFT trains on every assistant turn, except messages with "
                "``weight: 0``. If ``answer_key`` is given too, the answer is there, and the whole "
                "conversation is the prompt.",
            ),
        ]
    ]
    chosen_key: NotRequired[
        Annotated[
            str,
            Key(
                "DPO and reward models: field with the chosen answer: text, a number, messages that follow "
                "the prompt, or a conversation that ends with the answer. Omit ``prompt_key`` if both "
                "answers are whole conversations."
            ),
        ]
    ]
    rejected_key: NotRequired[
        Annotated[
            str,
            Key(
                "DPO and reward models: field with the rejected answer, in the same forms as ``chosen_key``."
            ),
        ]
    ]
    tools_key: NotRequired[
        Annotated[
            str,
            Key(
                "field with the list of tools that the chat template describes to the model; may be JSON "
                "text."
            ),
        ]
    ]
    system_key: NotRequired[
        Annotated[
            str,
            Key(
                "field with the record's system message, which replaces ``data.system_prompt``. An empty "
                "text means no system message, null means ``data.system_prompt``."
            ),
        ]
    ]
    extra_keys: NotRequired[
        Annotated[
            list[str],
            Key(
                "names of further record fields to pass on: to a reward function in its argument "
                "``record``, to an environment in the ``fields`` of each record."
            ),
        ]
    ]
    env_name: NotRequired[
        Annotated[
            str,
            Key(
                "name of the environment, a section inside ``env``, that scores responses to this source's "
                "prompts."
            ),
        ]
    ]
    weight: NotRequired[
        Annotated[
            float,
            Key(
                "share of the training prompts that come from this source, relative to the other sources' "
                "weights; it holds at every point of the run, not only on average. If no source has a "
                "weight, each record appears once per epoch.",
                ABOVE_0,
            ),
        ]
    ]
    repeat: NotRequired[
        Annotated[int, Key("number of times each record appears in an epoch (default 1).", AT_LEAST_1)]
    ]
    max_samples: NotRequired[
        Annotated[
            int | None,
            Key("maximum number of records read, the first ones; null or absent for all.", AT_LEAST_1),
        ]
    ]


class ValidationSource(DataSource):
    """Data source for validation, with settings for sampling responses to its prompts.

    Sources with the same ``val_set`` form one set and must agree on these settings. SFT and DPO validate all
    sources as one set.
    """

    val_set: NotRequired[
        Annotated[
            str,
            Key(
                "name of the validation set that this source belongs to, for metrics; when absent, the last "
                "part of ``name`` (after the last `/`), or the file name of ``path`` without its extension."
            ),
        ]
    ]
    val_num_generations_per_prompt: NotRequired[
        Annotated[
            int,
            Key(
                "number of responses sampled per prompt of this set; the algorithm's key of the same name "
                "when absent.",
                AT_LEAST_1,
            ),
        ]
    ]
    val_temperature: NotRequired[
        Annotated[
            float,
            Key(
                "sampling temperature of this set, 0 for greedy decoding; "
                "``policy.generation.val_temperature`` when absent.",
                AT_LEAST_0,
            ),
        ]
    ]
    val_top_p: NotRequired[
        Annotated[
            float,
            Key(
                "``top_p`` with which this set is sampled; ``policy.generation.val_top_p`` when absent.",
                POSITIVE_SHARE,
            ),
        ]
    ]
    val_top_k: NotRequired[
        Annotated[
            int | None,
            Key(
                "``top_k`` with which this set is sampled; null keeps all tokens, "
                "``policy.generation.val_top_k`` when absent.",
                AT_LEAST_1,
            ),
        ]
    ]


class DataConfig(TypedDict):
    """Data sources of a run, and how their records become token sequences."""

    train: Annotated[DataSource | list[DataSource], Key("training data: a source or a list of them.")]
    validation: NotRequired[
        Annotated[
            ValidationSource | list[ValidationSource] | None,
            Key(
                "validation data: a source or a list of them; each source is a set with metrics of its own, "
                "unless ``val_set`` joins several. null for none.",
                default=None,
            ),
        ]
    ]
    max_input_seq_length: Annotated[
        int,
        Key(
            "maximum length in tokens of a prompt (SFT, DPO and reward models: of prompt and answer "
            "together).",
            AT_LEAST_1,
        ),
    ]
    filter_overlong_prompts: NotRequired[
        Annotated[
            bool,
            Key(
                "leave out records longer than ``max_input_seq_length``, and report how many there are; "
                "false refuses to start with such records.",
                default=False,
            ),
        ]
    ]
    on_bad_record: NotRequired[
        Annotated[
            Literal["refuse", "skip"],
            Key(
                "what to do with a record that cannot be used: ``refuse`` does not start the run; ``skip`` "
                "leaves the record out, and reports the number of such records and the first few.",
                default="refuse",
            ),
        ]
    ]
    shuffle: NotRequired[
        Annotated[
            bool,
            Key(
                "shuffle the records in a new order for each epoch, in an order that follows from ``seed``; "
                "false keeps the stored order.",
                default=True,
            ),
        ]
    ]
    system_prompt: NotRequired[
        Annotated[
            str | None,
            Key(
                "system message put before every prompt, except before a conversation that has one; null "
                "for none.",
                default=None,
            ),
        ]
    ]
    prompt_template: NotRequired[
        Annotated[
            str | None,
            Key(
                "text around each prompt, which replaces ``{prompt}`` in it; prompts that are lists of "
                "messages stay unchanged. null for no template.",
                default=None,
            ),
        ]
    ]
    cache_dir: NotRequired[
        Annotated[
            str | None,
            Key(
                "directory that keeps tokenized sources (if larger than 8 MiB of tokens) and DPO's "
                "reference log-probabilities for later starts; null for `megarl/data` in the user's cache "
                "directory.",
                default=None,
            ),
        ]
    ]
    cache_gib: NotRequired[
        Annotated[
            float | None,
            Key(
                "maximum total size of `cache_dir` in GiB; the least recently used files are deleted first, "
                "never files in use. null for no limit.",
                ABOVE_0,
                default=DEFAULT_CACHE_GIB,
            ),
        ]
    ]


def sources_of(data: Mapping[str, Any], key: str) -> Iterator[tuple[str, ValidationSource]]:
    """Yield (dotted path, section) of each data source.

    Args:
        data: the ``data`` section, unchecked.
        key: ``train`` or ``validation``.
    """
    value = data.get(key)
    places = (
        {f"data.{key}.{place}": source for place, source in enumerate(value)}
        if isinstance(value, list)
        else {f"data.{key}": value}
    )
    for path, source in places.items():
        if isinstance(source, Mapping):
            yield path, cast(ValidationSource, source)


def set_module(source: DataSource) -> str | None:
    """Return the module of the built-in data set that a source uses, or None. A source with field keys of
    its own uses none."""
    own_keys = any(source.get(key) is not None for key in ("prompt_key", "messages_key", *PAIR_KEYS))
    return None if own_keys else NAMED_SETS.get(str(source.get("name")))


def is_file(path: str) -> bool:
    """Return whether a path has the suffix of a data file; the file need not exist."""
    return Path(path).suffix.lower() in FILE_SUFFIXES


def replaced_keys(written: Mapping[str, Any]) -> frozenset[str]:
    """Return the keys that a data source must not inherit, because the keys in ``written`` replace them.

    Another ``path`` or ``name`` means other data, whose fields are called differently. ``messages_key``
    replaces ``prompt_key`` and ``answer_key``, and ``prompt_key`` replaces ``messages_key``.
    """
    replaced = set[str]()
    if any(written.get(key) is not None for key in PLACE_KEYS):
        replaced |= _OF_ONE_PLACE
    if written.get("messages_key") is not None:
        replaced |= {"prompt_key", "answer_key"}
    if written.get("prompt_key") is not None:
        replaced.add("messages_key")
    return frozenset(replaced - written.keys())


def fields_of_key(value: str | Sequence[str]) -> Sequence[str]:
    """Return the field names in the value of ``prompt_key`` or ``answer_key``, a single name or a list of
    names."""
    return [value] if isinstance(value, str) else value


def key_steps(path: str) -> tuple[str | int, ...] | None:
    """Return the field names and list indices in a key such as ``reward_model.ground_truth`` or
    ``prompt[0].content``; None if the text does not have this form."""
    steps: list[str | int] = []
    place = 0
    while place < len(path):
        match = _STEP.match(path, place)
        # A record is an object, so a key cannot begin with a list index.
        if match is None or (place == 0 and match[1] is None):
            return None
        steps.append(match[1] if match[1] is not None else int(match[2]))
        place = match.end()
    return tuple(steps) or None
