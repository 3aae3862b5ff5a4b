"""Convert the arguments of ``megarl.train`` to a configuration, and name these arguments in the
configuration's error messages."""

from __future__ import annotations

import difflib
import inspect
import json
import os
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, Literal, get_args

from megarl.config.algorithms import ALGORITHMS, KEY, algorithm_class, run_type
from megarl.config.data_sources import FIELD_KEYS, NAMED_SETS, PAIR_KEYS, DataSource
from megarl.config.guesses import nearest
from megarl.config.nested import at, has, merge, put
from megarl.config.other_trainers import foreign_fault
from megarl.config.recipes import find, name_of
from megarl.config.reward_arguments import ANSWER, SEVERAL, SINGLE, STATE, arguments_of, unknown_parameters
from megarl.config.schema import known_paths
from megarl.config.sections import Config
from megarl.errors import ConfigError, Violation
from megarl.import_path import GIVEN, give_object, load_object
from megarl.library.rows import (
    columns_of,
    passable_columns,
    require_columns,
    source_of,
    write_empty_answers,
)

Backend = Literal["megatron", "dtensor", "fsdp1"]

OVER_GRPO = ("cispo", "dapo", "dr-grpo", "gdpo", "gspo", "gspo-token", "reinforce-plus-plus", "rloo")
"""Algorithms that a file in ``configs/base`` defines as changes to the GRPO configuration."""

_ALONE = ("grpo", "sft", "dpo", "rm")
_SOURCE_KEYS = (*FIELD_KEYS, *PAIR_KEYS, "extra_keys")
_MEGATRON_LR, _TORCH_LR, _SHARED_LR = (
    "policy.megatron_cfg.optimizer.lr",
    "policy.optimizer.kwargs.lr",
    "policy.learning_rate",
)
_STEPS, _PROMPTS, _RESPONSES = 100, 8, 8
_LONGEST_PROMPT, _LONGEST_RESPONSE = 512, 256
# Learning rates at the start of warm-up and the end of decay. Both must not exceed the requested learning
# rate, so ``add_sizes`` sets them to a tenth of it.
_SLOWEST_START = ("policy.megatron_cfg.optimizer.min_lr", "policy.megatron_cfg.scheduler.lr_warmup_init")
_ARGUMENTS = ("model", "data", "validation", "reward", "run_dir", "progress", "backend")


@dataclass
class Call:
    """A library call, converted to a configuration file.

    Attributes:
        written: contents of the configuration file.
        arguments: dotted key -> name of the argument that set it; a key also covers the keys below it.
        given: name in the configuration (``given:NAME``) -> pickled reward function.
        functions: name in the configuration -> the function's own name, for messages.
        sources: name in the configuration -> the function's source code, saved for the user to read.
        faults: configuration errors found so far.
        made: data files that this call has created.
    """

    written: Config
    arguments: dict[str, str] = field(default_factory=dict)
    given: dict[str, bytes] = field(default_factory=dict)
    functions: dict[str, str] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)
    faults: list[Violation] = field(default_factory=list)
    made: list[Path] = field(default_factory=list)

    def put(self, key: str, value: Any, argument: str) -> None:
        """Set a key to an argument's value; a mapping is merged into an existing section. Records a fault
        instead if YAML cannot represent the value."""
        value = _plain(value)
        odd = _of_no_yaml(value)
        if odd is not None:
            fix = "give text, numbers, lists and dictionaries; a class or function by its import path"
            self.faults.append(Violation(argument, type(odd).__name__, "no configuration can hold it", fix))
            return
        merged = (
            merge(at(self.written, key), value)
            if isinstance(value, Mapping) and isinstance(at(self.written, key), Mapping)
            else value
        )
        self.written = put(self.written, key, merged)
        self.arguments[key] = argument

    def default(self, key: str, value: Any) -> None:
        """Set a key that no argument has set."""
        if not has(self.written, key):
            self.written = put(self.written, key, value)

    def named(self, violation: Violation) -> Violation:
        """Return a copy of a violation whose key is written ``ARGUMENT (KEY)``, and whose value names a
        reward function by its own name."""
        argument = self.argument_of(violation.key)
        key = f"{argument} ({violation.key})" if argument and argument != violation.key else violation.key
        value = self.functions.get(str(violation.value), violation.value)
        return Violation(key, value, violation.bound, violation.fix)

    def argument_of(self, key: str) -> str | None:
        """Return the argument that set a key or the closest section above it. If there is none, return all
        arguments that set keys below it, separated by commas, or None."""
        above = [each for each in self.arguments if key == each or key.startswith(f"{each}.")]
        if above:
            return self.arguments[max(above, key=len)]
        return (
            ", ".join(argument for each, argument in self.arguments.items() if each.startswith(f"{key}."))
            or None
        )

    def in_arguments(self, text: str) -> str:
        """Return a command's error message, with the argument added to each key that begins a numbered
        line."""

        def with_argument(match: re.Match[str]) -> str:
            argument = self.argument_of(match[2])
            return f"{match[1]}{argument} ({match[2]}) =" if argument and argument != match[2] else match[0]

        for path, name in self.functions.items():
            text = text.replace(path, name)
        return re.sub(r"(?m)^( +\d+\. )([\w.]+) =", with_argument, text)

    def require(self) -> None:
        """Raise ConfigError with all recorded faults, if there are any."""
        if self.faults:
            raise ConfigError(list(map(self.named, self.faults)))


def begin(algorithm: str, backend: Backend) -> Call:
    """Create a call that inherits the base files of an algorithm and a backend, or a recipe.

    Raises:
        ConfigError: the algorithm, recipe or backend does not exist, or the algorithm trains a second model.
    """
    if backend not in get_args(Backend):
        fix = f"give {', '.join(get_args(Backend))}"
        raise ConfigError([Violation("backend", backend, "there is no such backend", fix)])
    if algorithm in (*_ALONE, *OVER_GRPO):
        bases = [algorithm] if algorithm in _ALONE else ["grpo", algorithm]
        # The base files of the torch backends override those of the Megatron backend.
        backends = ["megatron"] if backend == "megatron" else ["megatron", backend]
        return Call(
            {"defaults": [f"base/{name}.yaml" for name in (*bases, *backends, "small")], "recipe": algorithm}
        )
    if algorithm in ALGORITHMS:
        fix = f"use a recipe for it (megarl recipes), or one of {', '.join((*_ALONE, *OVER_GRPO))}"
        raise ConfigError(
            [Violation("algorithm", algorithm, "it trains a second model, which no argument describes", fix)]
        )
    try:
        path = find(algorithm)
    except ConfigError as error:
        if algorithm.endswith((".yaml", ".yml")):
            raise
        known = [*_ALONE, *OVER_GRPO]
        near = difflib.get_close_matches(algorithm, known, n=1)
        fix = f"did you mean {near[0]!r}? It may be" if near else "give"
        fix += f" {', '.join(known)}; or a recipe (megarl recipes) or the path of a YAML file"
        raise ConfigError(
            [Violation("algorithm", algorithm, "there is no such algorithm or recipe", fix)]
        ) from error
    if not path.is_file():
        bound = f"there is no such file in {Path.cwd()}"
        raise ConfigError(
            [Violation("algorithm", algorithm, bound, "give a file that exists, an algorithm, or a recipe")]
        )
    return Call({"defaults": str(path.absolute()), "recipe": name_of(path)})


def is_of_base(call: Call) -> bool:
    """Return whether a call inherits an algorithm's base files, which leave the sizes open, instead of a
    recipe."""
    return isinstance(call.written["defaults"], list)


def add_overrides(call: Call, algorithm: str, inherited: Config, overrides: Mapping[str, object]) -> None:
    """Add the overrides of a call: a dictionary replaces keys of a section, other values set a dotted key or
    the last part of a key. Unknown and ambiguous names are recorded as faults.

    Args:
        call: gets the values.
        algorithm: algorithm of the inherited configuration; it decides which keys exist and are preferred.
        inherited: the configuration that the call inherits. Its backend decides which key ``learning_rate``
            sets.
        overrides: name -> value.
    """
    known = known_paths(run_type(algorithm))
    for name, value in overrides.items():
        if name in _SOURCE_KEYS:
            continue
        keys = [name] if "." in name else _keys_of(name, algorithm, inherited, known)
        if name == "steps" and isinstance(value, int):
            # Not those of the profiler, which are a list.
            keys = []
        if len(keys) == 1:
            call.put(keys[0], value, name)
        elif keys:
            fix = f"write it as a section: {keys[0].partition('.')[0]}={{...}}"
            call.faults.append(
                Violation(name, value, f"several keys end with this name: {', '.join(keys)}", fix)
            )
        else:
            [near] = difflib.get_close_matches(name, _ARGUMENTS, n=1) or [
                (nearest(name, known, algorithm_class(algorithm).section()) or "").rpartition(".")[2]
            ]
            fault = None if near else foreign_fault(name, value, {**inherited, KEY: algorithm})
            fix = f"did you mean {near}?" if near else fault.fix if fault else "megarl keys WORD finds keys"
            call.faults.append(
                Violation(
                    name,
                    value,
                    "megarl.train has no such argument, and no key of a configuration ends with this name",
                    fix,
                )
            )


def _keys_of(name: str, algorithm: str, inherited: Config, known: Sequence[str]) -> list[str]:
    if name == "learning_rate":
        # If a recipe's optimizers refer to the shared key, a value set for one optimizer would be ignored or
        # rejected.
        if at(inherited, _SHARED_LR) is not None:
            return [_SHARED_LR]
        return [_MEGATRON_LR if at(inherited, "policy.megatron_cfg.enabled") else _TORCH_LR]
    if name in known:
        return [name]
    if f"data.{name}" in known:
        return [f"data.{name}"]
    own = algorithm_class(algorithm).section()
    # A user who names no section means the algorithm's own key, or else one of the policy or the cluster.
    for section in (f"{own}.", "policy.", "cluster."):
        if f"{section}{name}" in known:
            return [f"{section}{name}"]
    # Keys of data sources are set by ``add_data``, and keys of other algorithms have no effect.
    others = (*ALGORITHMS, "data")
    return [path for path in known if path.endswith(f".{name}") and path.partition(".")[0] not in others]


def add_model(call: Call, model: Any) -> None:
    """Set the policy's model: a directory, a hub id, or a run whose exported model is used. Records a fault
    if a local directory does not exist or has no ``config.json``."""
    model = getattr(model, "model_dir", model)
    if not isinstance(model, str | os.PathLike):
        fix = "save it: model.save_pretrained(DIR) and tokenizer.save_pretrained(DIR), and give DIR"
        call.faults.append(
            Violation("model", type(model).__name__, "it must be a directory or a hub id", fix)
        )
        return
    text = os.fspath(model)
    call.put("policy.model_name", text, "model")
    path = Path(text).expanduser()
    # A hub id is NAME or OWNER/NAME.
    looks_local = path.is_absolute() or text.startswith((".", "~")) or text.count("/") > 1
    if path.is_dir() and not (path / "config.json").is_file():
        found = f"{path.absolute()} has no config.json"
        call.faults.append(
            Violation("model", text, found, "give a directory that save_pretrained or megarl wrote")
        )
    elif looks_local and not path.is_dir():
        call.faults.append(
            Violation(
                "model",
                text,
                f"there is no such directory in {Path.cwd()}",
                "give one that exists, or a hub id",
            )
        )


def add_data(
    call: Call, arguments: Mapping[str, object], directory: Path, kind: Any, overrides: Mapping[str, object]
) -> None:
    """Set the training and validation data sources; rows held in memory are written to a file first.

    Args:
        call: gets the sources.
        arguments: the arguments ``data`` and ``validation``; None if not given.
        directory: directory for files of rows.
        kind: ``megarl.data.columns.Kind``, which decides the columns that a row needs.
        overrides: overrides of the call; field keys of data sources (such as ``prompt_key``) are applied.
    """
    keys: Any = {name: overrides[name] for name in _SOURCE_KEYS if name in overrides}
    for argument, key in (("data", "data.train"), ("validation", "data.validation")):
        data = arguments[argument]
        if data is None:
            continue
        try:
            source = source_of(argument, data, directory, call.made)
            # Field keys do not apply to a named validation set, which defines its own. A source that is given
            # as a mapping overrides them.
            if argument == "data" or source.get("name") not in NAMED_SETS:
                source = {**keys, **source}
            if "path" in source:
                _find_columns(
                    call, argument, source, kind, is_written=not isinstance(data, str | os.PathLike | Mapping)
                )
            call.put(key, source, argument)
        except ConfigError as error:
            call.faults += error.violations


def _find_columns(call: Call, argument: str, source: DataSource, kind: Any, *, is_written: bool) -> None:
    try:
        require_columns(argument, source, kind)
    except ConfigError as error:
        # A reward function that reads only the response works without reference answers, so store empty ones.
        if not is_written or not call.given or any(map(_takes_answer, call.given)):
            raise
        write_empty_answers(source, call.made)
        try:
            require_columns(argument, source, kind)
        except ConfigError:
            # The rows still lack a column, so the answers were not the cause: report the first error.
            raise error from None


def _takes_answer(path: str) -> bool:
    arguments = arguments_of(load_object(path, "env.reward"))
    for name in (*arguments.positional, *arguments.keywords):
        meaning = SEVERAL.get(name) or SINGLE.get(name)
        if meaning in (ANSWER, STATE):
            return True
    return False


def add_rewards(call: Call, reward: Any) -> None:
    """Set the reward: a name, a function, a list of these, or a dictionary of ``env.rewards`` sections."""
    if isinstance(reward, str):
        call.put("env.reward", reward, "reward")
    elif callable(reward):
        call.put("env.reward", _given(call, reward, set()), "reward")
    elif isinstance(reward, Mapping | Sequence) and reward:
        names = set[str]()
        sections = (
            dict(_sections(reward))
            if not isinstance(reward, Mapping)
            else {name: _section(each) for name, each in reward.items()}
        )
        for section in sections.values():
            if callable(section.get("reward")):
                section["reward"] = _given(call, section["reward"], names)
        call.put("env.rewards", sections, "reward")
        call.default("env.reward", None)
    else:
        fix = (
            "give a function such as lambda response, answer: float(answer in response), a name such as "
            "'math', or a list of these"
        )
        call.faults.append(
            Violation("reward", reward, "it is neither a function nor the name of a reward", fix)
        )


def _section(reward: Any) -> Config:
    return dict(reward) if isinstance(reward, Mapping) else {"reward": reward}


def _sections(rewards: Sequence[Any]) -> Iterator[tuple[str, Config]]:
    names = set[str]()
    for each in rewards:
        section = _section(each)
        yield _free(_name_of(section.get("reward")), names), section


def _name_of(reward: Any) -> str:
    name = reward.rpartition(":")[2] if isinstance(reward, str) else getattr(reward, "__name__", "reward")
    return name if name.isidentifier() else "reward"


def _free(name: str, taken: set[str]) -> str:
    number, free = 1, name
    while free in taken:
        number += 1
        free = f"{name}_{number}"
    taken.add(free)
    return free


def _given(call: Call, function: Callable[..., Any], taken: set[str]) -> str:
    import cloudpickle

    name = _free(_name_of(function), taken)
    path = f"{GIVEN}{name}"
    call.functions[path] = getattr(function, "__name__", type(function).__name__)
    try:
        pickled = cloudpickle.dumps(function)
    # An object in a closure may raise any exception when it is pickled.
    except Exception as error:
        fix = (
            "let the function make what it needs (a lock, a client, a model) when it is called, or write "
            "it into a file"
        )
        bound = f"it cannot be sent to the processes that compute rewards: {type(error).__name__}: {error}"
        call.faults.append(Violation("reward", call.functions[path], bound, fix))
        return path
    give_object(name, function, pickled)
    call.given[path] = pickled
    try:
        call.sources[path] = textwrap.dedent(inspect.getsource(function))
    # Callable objects, and functions defined in ``python -c``, have no source file.
    except (OSError, TypeError):
        call.sources[path] = f"# {function!r}: Python does not know its source\n"
    return path


def require_parameters_in_data(call: Call) -> None:
    """Pass the data columns to the reward functions that have parameters of these names, through
    ``extra_keys``. Does nothing if the call sets ``extra_keys`` itself."""
    source: DataSource | None = at(call.written, "data.train")
    functions = [load_object(path, "env.reward") for path in call.given]
    if not functions or not isinstance(source, Mapping) or "path" not in source or "extra_keys" in source:
        return
    used = {
        source.get(key)
        for key in ("prompt_key", "answer_key", "messages_key")
        if isinstance(source.get(key), str)
    }
    named, reads_all = set[str](), False
    for function in functions:
        parameters = arguments_of(function)
        named.update(unknown_parameters(function), parameters.optional)
        reads_all |= parameters.reads_record
    for key in ("data.train", "data.validation"):
        source = at(call.written, key)
        if not isinstance(source, Mapping) or "path" not in source:
            continue
        # A function that takes the whole record gets every column that can be passed. Otherwise pass only the
        # columns that a parameter names.
        wanted = named & set(columns_of(source)) | (passable_columns(source) - used if reads_all else set())
        if wanted:
            call.default(f"{key}.extra_keys", sorted(wanted))


def add_sizes(call: Call, algorithm: str, num_rows: int | None) -> None:
    """Choose batch sizes, number of steps, lengths and precision for a first try; values set by arguments are
    kept.

    Args:
        call: a call that inherits an algorithm's base files.
        algorithm: its algorithm.
        num_rows: number of training rows, which bounds the batch size; None if unknown.
    """
    kind = algorithm_class(algorithm)
    own = kind.section()
    call.default(f"{own}.max_num_steps", _STEPS)
    if kind.GENERATES:
        call.default(f"{own}.num_prompts_per_step", max(1, min(_PROMPTS, num_rows or _PROMPTS)))
        call.default(f"{own}.num_generations_per_prompt", _RESPONSES)
        prompts = at(call.written, f"{own}.num_prompts_per_step")
        responses = at(call.written, f"{own}.num_generations_per_prompt")
        if isinstance(prompts, int) and isinstance(responses, int):
            call.default("policy.train_global_batch_size", prompts * responses)
    else:
        call.default(f"{own}.max_num_epochs", None)
        call.default("policy.train_global_batch_size", max(1, min(_PROMPTS, num_rows or _PROMPTS)))
    batch = at(call.written, "policy.train_global_batch_size")
    if isinstance(batch, int) and batch > 0:
        # A micro-batch must divide the batch; 4 samples of these lengths need little memory.
        call.default(
            "policy.train_micro_batch_size", next(size for size in (4, 3, 2, 1) if batch % size == 0)
        )
    if at(call.written, "data.validation") is None:
        call.default(f"{own}.val_period", 0)
        call.default(f"{own}.val_at_start", False)
    _add_lengths(call, kind.GENERATES)
    _add_precision(call)
    rate = at(call.written, _MEGATRON_LR)
    for key in _SLOWEST_START if isinstance(rate, int | float) else ():
        call.default(key, rate / 10)


def _add_lengths(call: Call, generates: bool) -> None:
    model = call.written.get("policy", {}).get("model_name")
    longest = _json(Path(str(model)).expanduser() / "config.json").get("max_position_embeddings")
    response = at(call.written, "policy.generation.max_new_tokens")
    prompt = at(call.written, "data.max_input_seq_length")
    total = at(call.written, "policy.max_total_sequence_length")
    room = min(each for each in (total, longest, 1 << 60) if isinstance(each, int))
    if not generates:
        call.default("data.max_input_seq_length", min(_LONGEST_PROMPT + _LONGEST_RESPONSE, room))
        call.default("policy.max_total_sequence_length", at(call.written, "data.max_input_seq_length"))
        return
    if not isinstance(response, int):
        left = room - prompt if isinstance(prompt, int) else room // 2
        response = max(1, min(_LONGEST_RESPONSE, left))
        call.default("policy.generation.max_new_tokens", response)
    if not isinstance(prompt, int):
        prompt = max(1, min(_LONGEST_PROMPT, room - response))
        call.default("data.max_input_seq_length", prompt)
    call.default("policy.max_total_sequence_length", prompt + response)


def _add_precision(call: Call) -> None:
    from megarl.distributed import nvml

    model = Path(str(at(call.written, "policy.model_name"))).expanduser()
    if not nvml.count_devices():
        call.default("policy.precision", "float32")
    is_base = (
        model.is_dir()
        and not (model / "chat_template.jinja").is_file()
        and not (model / "chat_template.json").is_file()
        and "chat_template" not in _json(model / "tokenizer_config.json")
    )
    if is_base:
        # A model directory without a chat template is a base model, whose prompts are passed unchanged.
        call.default("policy.tokenizer.chat_template", None)


def _json(path: Path) -> dict[str, object]:
    try:
        found = json.loads(path.read_bytes())
    # Ignore the error here: loading the model will report it.
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _plain(value: Any) -> Any:
    """Convert mappings, sequences, paths, enums, and NumPy or torch values to types that YAML can
    represent."""
    if isinstance(value, Mapping):
        return {str(name): _plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return list(map(_plain, value))
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, Enum):
        return _plain(value.value)
    # NumPy arrays, NumPy scalars and torch tensors have ``tolist``.
    return value.tolist() if callable(getattr(value, "tolist", None)) else value


def _of_no_yaml(value: Any) -> Any:
    """Return the first value inside ``value`` that YAML cannot represent, or None."""
    # The safe YAML dumper rejects subclasses such as ``numpy.float64``, so compare types exactly.
    if type(value) in (str, int, float, bool, type(None)):
        return None
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    if parts is None:
        return value
    for each in parts:
        odd = _of_no_yaml(each)
        if odd is not None:
            return odd
    return None
