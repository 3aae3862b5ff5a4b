"""Generator of the tables in ``configs/README.md`` and ``configs/KEYS.md``: ``python -m
megarl.config.reference configs``.

``README.md`` gets tables of recipes, from their dry runs; ``KEYS.md`` a table of keys per section, from the
TypedDicts and their ``Key`` annotations.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, NotRequired, get_args, get_origin

from typing_extensions import is_typeddict

from megarl.config.algorithms import run_type
from megarl.config.backend import generation_of
from megarl.config.defaults import complete_run
from megarl.config.load import load_config
from megarl.config.model_facts import read_model_facts
from megarl.config.other_trainers import foreign_fault
from megarl.config.plan import batch_plan, ledger, memory_of_run, size_text
from megarl.config.rules.not_yet import NEVER_LEGAL
from megarl.config.sections import Config
from megarl.config.tables import FOREIGN_KEYS
from megarl.config.validate import validate_config
from megarl.key import fields_of, keys_of, named_section_types, section_types

_WORDS = {
    int: "whole number",
    float: "number",
    bool: "true or false",
    str: "text",
    NoneType: "null",
    Any: "any value",
}
_BEGIN, _END = "<!-- generated: {} -->", "<!-- end: {} -->"
_MISSING = object()
PAGES: Mapping[str, str] = {"README.md": "recipes", "KEYS.md": "keys"}
"""File name of each page -> name of its generated table."""


def main(arguments: Sequence[str]) -> int:
    """Update both pages in the directory ``arguments[0]``, and return the exit code."""
    configs = Path(arguments[0])
    for name in PAGES:
        page = configs / name
        page.write_text(updated(page.read_text(encoding="utf-8"), name, configs), encoding="utf-8")
    return 0


def updated(page: str, name: str, configs: Path) -> str:
    """Return the text of a page with its generated table replaced by the current one.

    Args:
        page: text of the page, with the table between the lines ``<!-- generated: TABLE -->`` and ``<!-- end:
            TABLE -->``, where TABLE is the page's entry in ``PAGES``.
        name: file name of the page.
        configs: directory of the recipes.

    Raises:
        ValueError: one of these lines is missing or repeated.
    """
    table = PAGES[name]
    begin, end = _BEGIN.format(table), _END.format(table)
    if page.count(begin) != 1 or page.count(end) != 1:
        raise ValueError(
            f"{name} must have the lines {begin} and {end} once each. Fix: put them where the table belongs"
        )
    lines = [*recipe_table(configs), "", *ledger_table(configs)] if table == "recipes" else key_tables()
    before, rest = page.split(begin)
    return f"{before}{begin}\n\n" + "\n".join(lines) + f"\n\n{end}{rest.split(end)[1]}"


def recipe_table(configs: Path) -> Iterator[str]:
    """Yield the lines of a Markdown table of recipes: ranks, parallel sizes, tokens per micro-batch, and
    memory of the fullest rank."""
    yield (
        "| recipe | nodes x ranks | pipeline, data, tensor, expert | tokens a micro-batch | recompute | "
        "fullest rank |"
    )
    yield "|---|---|---|---|---|---|"
    for path in sorted(configs.glob("*.yaml")):
        config = validate_config(load_config(path), name=path.stem)
        layout, rows = memory_of_run(config)
        policy, cluster = config["policy"], config["cluster"]
        megatron, dtensor = policy["megatron_cfg"], policy["dtensor_cfg"]
        packing = policy["sequence_packing"]
        tokens = batch_plan(config, layout).tokens_per_micro_batch
        # Only sections of enabled backends have their defaults, hence ``get``.
        recompute = (
            megatron.get("activation_checkpointing")
            or dtensor.get("activation_checkpointing")
            or policy["activation_checkpointing_enabled"]
        )
        cells = (
            f"`{path.stem}`",
            f"{cluster['num_nodes']} x {cluster['gpus_per_node']}",
            (
                f"{layout.pipeline}, {layout.data}, {layout.tensor}, "
                f"{megatron.get('expert_model_parallel_size', 1)}"
            ),
            f"{packing['train_mb_tokens']:,}, packed" if packing["enabled"] else f"{tokens:,}",
            "yes" if recompute else "no",
            size_text(max(row.peak for row in rows)) if rows else "",
        )
        yield f"| {' | '.join(cells)} |"


def ledger_table(configs: Path) -> Iterator[str]:
    """Yield the lines of a Markdown table of the recipes whose engine shares the policy's devices: GiB in
    use on the fullest device at each moment of a run."""
    rows = []
    for path in sorted(configs.glob("*.yaml")):
        config = validate_config(load_config(path), name=path.stem)
        facts = read_model_facts(config["policy"]["model_name"])
        moments = [] if facts is None else ledger(config, facts, memory_of_run(config)[1])
        if moments and generation_of(config["policy"])["colocated"]["enabled"]:
            rows.append((path.stem, {moment.name: f"{moment.total / 2**30:.1f}" for moment in moments}))
    # Runs with further models have moments of their own.
    names = list(dict.fromkeys(name for _, used in rows for name in used))
    if rows:
        yield f"| recipe | {' | '.join(names)} |"
        yield f"|{'---|' * (1 + len(names))}"
    for recipe, used in rows:
        yield f"| `{recipe}` | {' | '.join(used.get(name, '') for name in names)} |"


def key_tables() -> Iterator[str]:
    """Yield the lines of a Markdown table for every section, in the order in which a configuration is
    written."""
    for number, (path, section) in enumerate(_sections("", run_type(None))):
        if number:
            yield ""
        yield f"## {f'`{path}`' if path else 'The top level'}"
        yield ""
        yield _in_markdown(_summary(section))
        yield ""
        yield "| key | value | default | meaning |"
        yield "|---|---|---|---|"
        for key, kind, default, meaning in _rows(path, section):
            yield f"| `{key}` | {kind} | {default} | {_in_markdown(meaning)} |"


def _rows(path: str, section: Any) -> Iterator[tuple[str, str, str, str]]:
    """Yield (key, allowed values in words, default, meaning) for each key of a section."""
    fields = fields_of(section)
    for key, annotation in keys_of(section).items():
        full = f"{path}.{key}" if path else key
        kind = _kind(annotation, NEVER_LEGAL.get(full, frozenset()))
        if key in fields and fields[key].bounds is not None:
            kind += f"; {fields[key].bounds}"
        yield (
            key,
            kind,
            _default(annotation, *_absent_values(full)),
            fields[key].meaning if key in fields else "",
        )


def search_keys(words: Sequence[str]) -> Iterator[str]:
    """Yield a paragraph for every key whose dotted name, allowed values or meaning contain all words,
    ignoring case; keys of other trainers come last.

    Args:
        words: words to search for; without any, all of megarl's own keys match.
    """
    wanted = [word.lower() for word in words]
    for path, section in _sections("", run_type(None)):
        for key, kind, default, meaning in _rows(path, section):
            full = f"{path}.{key}" if path else key
            if all(word in f"{full} {kind} {meaning}".lower() for word in wanted):
                absent = f", {'' if default == 'required' else 'default '}{default}" if default else ""
                yield f"{full}: {kind}{absent}\n    {meaning}".replace("`", "")
    for trainer, table in FOREIGN_KEYS.items():
        for key in table:
            if wanted and all(word in key.lower() for word in wanted):
                fault = foreign_fault(key, "VALUE", {})
                yield f"{key} of {trainer}: {fault.fix}" if fault else ""


def _sections(path: str, section: Any) -> Iterator[tuple[str, Any]]:
    """Yield (dotted path, TypedDict) of a section and of all its subsections."""
    yield path, section
    for key, annotation in keys_of(section).items():
        # Remove duplicates: a key may accept a section or a list of sections, both with the same keys.
        for inner in dict.fromkeys(section_types(annotation)):
            yield from _sections(f"{path}.{key}" if path else key, inner)
        for inner in named_section_types(annotation):
            yield from _sections(f"{path}.{key}.NAME" if path else f"{key}.NAME", inner)


def _kind(annotation: Any, refused: frozenset[Any] = frozenset()) -> str:
    """Describe the values that an annotation allows in words, without the values that a rule always
    refuses."""
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin in {NotRequired, Annotated}:
        return _kind(parts[0], refused)
    if origin is Literal:
        return ", ".join(f"`{part}`" for part in parts if part not in refused)
    if annotation is bool and refused:
        return ", ".join(f"`{str(value).lower()}`" for value in (True, False) if value not in refused)
    if is_typeddict(annotation):
        return "section"
    if origin is list:
        return f"list of {_kind(parts[0])}"
    if origin is dict or annotation is dict:
        return "keys and values"
    if parts:
        return " or ".join(dict.fromkeys(map(_kind, parts)))
    return _WORDS.get(annotation, str(annotation))


def _default(annotation: Any, first: Any, second: Any) -> str:
    """Return the table's text for a key's default. A default that differs between two example configurations
    is derived from other keys (``follows``)."""
    if get_origin(annotation) is not NotRequired:
        return "required"
    if first is _MISSING or (isinstance(first, Mapping) and any(True for _ in section_types(annotation))):
        return ""
    if first != second:
        return "follows"
    return f"`{'null' if first is None else str(first).lower() if isinstance(first, bool) else first}`"


def _absent_values(path: str) -> Iterator[Any]:
    """Yield the value that an absent key gets, in each of two example configurations that differ in all
    sizes."""
    # A default that is the same in both examples is a constant; one that is derived from another key differs.
    for size in (8, 24):
        example = _example(size)
        *parents, key = path.split(".")
        section = _value(example, ".".join(parents)) if parents else example
        if isinstance(section, dict):
            section.pop(key, None)
        yield _value(complete_run(example, f"run-{size}"), path)


def _value(config: Any, path: str) -> Any:
    for key in path.split("."):
        if not isinstance(config, Mapping) or key not in config:
            return _MISSING
        config = config[key]
    return config


def _example(size: int) -> Config:
    """Return a configuration with required keys only. Examples of different sizes differ in every default
    that is derived from other keys."""
    source = {"path": "train.jsonl", "prompt_key": "prompt", "answer_key": "answer"}
    megatron = {"enabled": True, "optimizer": {"lr": 1e-6 * size}, "tensor_model_parallel_size": size // 4}
    sections = {"generation": {"max_new_tokens": size}, "reward_model_cfg": {"enabled": True}}
    sizes = {
        "train_global_batch_size": size,
        "train_micro_batch_size": size // 8,
        "max_total_sequence_length": size,
    }
    # Enable both backends, because only enabled sections get their defaults. No rule checks these examples.
    backends = {
        "precision": "bfloat16" if size == 8 else "float32",
        "megatron_cfg": megatron,
        "dtensor_cfg": {"enabled": True},
    }
    return {
        "run_dir": f"runs/{size}",
        "seed": size,
        "policy": {
            "model_name": "m",
            "tokenizer": {"name": "m"},
            "optimizer": {},
            **sizes,
            **backends,
            **sections,
        },
        "grpo": {"num_prompts_per_step": size, "num_generations_per_prompt": 2, "max_num_steps": size},
        "sft": {"max_num_steps": size},
        "dpo": {"max_num_steps": size},
        "rm": {"max_num_steps": size},
        "ppo": {"num_prompts_per_step": size, "max_num_steps": size, "ppo_epochs": size // 8},
        "distillation": {"num_prompts_per_step": size, "max_num_steps": size},
        "loss_fn": {},
        "env": {"reward": "exact_match"},
        "data": {"train": source, "max_input_seq_length": size},
        "cluster": {"gpus_per_node": size, "num_nodes": 1},
    }


def _summary(section: Any) -> str:
    return (inspect.getdoc(section) or "").split("\n\n")[0].replace("\n", " ")


def _in_markdown(text: str) -> str:
    return text.replace("``", "`").replace("|", "\\|")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
