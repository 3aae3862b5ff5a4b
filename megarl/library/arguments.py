"""Conversion of the arguments of ``megarl.train`` to a configuration, and of the configuration's faults back
to these arguments."""

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

from megarl.config.algorithms import ALGORITHMS, algorithm_class, run_type
from megarl.config.data_sources import FIELD_KEYS, NAMED_SETS, PAIR_KEYS
from megarl.config.nested import at, has, merge, put
from megarl.config.recipes import find, name_of
from megarl.config.reward_arguments import ANSWER, SEVERAL, SINGLE, STATE, arguments_of, unknown_parameters
from megarl.config.schema import known_paths
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
"""Algorithms that are defined by a file of ``configs/base`` over GRPO."""

_ALONE = ("grpo", "sft", "dpo", "rm")
_SOURCE_KEYS = (*FIELD_KEYS, *PAIR_KEYS, "extra_keys")
_MEGATRON_LR, _TORCH_LR, _SHARED_LR = (
    "policy.megatron_cfg.optimizer.lr",
    "policy.optimizer.kwargs.lr",
    "policy.learning_rate",
)
_STEPS, _PROMPTS, _RESPONSES = 100, 8, 8
_LONGEST_PROMPT, _LONGEST_RESPONSE = 512, 256
# These learning rates must not be above the requested one.
_SLOWEST_START = ("policy.megatron_cfg.optimizer.min_lr", "policy.megatron_cfg.scheduler.lr_warmup_init")


@dataclass
class Call:
    """A call of the library, converted to a configuration file.

    Attributes:
        written: contents of that file.
        arguments: the argument that set each dotted key; the longest matching prefix decides.
        given: pickles of reward functions, by their names in the configuration.
        functions: the caller's names of these functions, by the same names.
        sources: source code of the functions, for people to read.
        faults: all faults found so far.
        made: files of data that the call has created.
    """

    written: dict[str, Any]
    arguments: dict[str, str] = field(default_factory=dict)
    given: dict[str, bytes] = field(default_factory=dict)
    functions: dict[str, str] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)
    faults: list[Violation] = field(default_factory=list)
    made: list[Path] = field(default_factory=list)

    def put(self, key: str, value: Any, argument: str) -> None:
        """Write an argument's value into the configuration. A value that YAML cannot represent is recorded as
        a fault."""
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
        """Write a value for a key that no argument has set."""
        if not has(self.written, key):
            self.written = put(self.written, key, value)

    def named(self, violation: Violation) -> Violation:
        """Return the violation with the argument's name, followed by the key."""
        argument = self.argument_of(violation.key)
        key = f"{argument} ({violation.key})" if argument and argument != violation.key else violation.key
        value = self.functions.get(str(violation.value), violation.value)
        return Violation(key, value, violation.bound, violation.fix)

    def argument_of(self, key: str) -> str | None:
        """Return the argument that set a key or a section above it, or else the arguments that set keys of
        this section; None if there are none."""
        above = [each for each in self.arguments if key == each or key.startswith(f"{each}.")]
        if above:
            return self.arguments[max(above, key=len)]
        return (
            ", ".join(argument for each, argument in self.arguments.items() if each.startswith(f"{key}."))
            or None
        )

    def in_arguments(self, text: str) -> str:
        """Return the message of a command with keys at the beginning of its lines replaced by arguments and
        keys."""

        def with_argument(match: re.Match[str]) -> str:
            argument = self.argument_of(match[2])
            return f"{match[1]}{argument} ({match[2]}) =" if argument and argument != match[2] else match[0]

        for path, name in self.functions.items():
            text = text.replace(path, name)
        return re.sub(r"(?m)^( +\d+\. )([\w.]+) =", with_argument, text)

    def require(self) -> None:
        """Raise ConfigError with all faults, if there are any."""
        if self.faults:
            raise ConfigError(list(map(self.named, self.faults)))


def begin(algorithm: str, backend: Backend) -> Call:
    """Return a call with the configuration that it inherits: the files of an algorithm and a backend, or a
    recipe.

    Raises:
        ConfigError: there is no such algorithm, recipe or backend, or the algorithm needs a second model.
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
    """Return whether a call inherits the files of an algorithm, which leave sizes open, rather than a
    recipe."""
    return isinstance(call.written["defaults"], list)


def add_overrides(
    call: Call, algorithm: str, inherited: Mapping[str, Any], overrides: Mapping[str, Any]
) -> None:
    """Write overrides into a call: a section as a dictionary, a whole dotted key, or the last part of a key
    if it is unique.

    Args:
        call: the call.
        algorithm: name of the algorithm.
        inherited: the configuration that the call inherits, whose backend decides which key is the learning
            rate.
        overrides: the overrides.
    """
    known = known_paths(run_type(algorithm))
    for name, value in overrides.items():
        if name in _SOURCE_KEYS:
            continue
        keys = [name] if "." in name else _keys_of(name, algorithm, inherited, known)
        if len(keys) == 1:
            call.put(keys[0], value, name)
        elif keys:
            fix = f"write it as a section: {keys[0].partition('.')[0]}={{...}}"
            call.faults.append(
                Violation(name, value, f"several keys end with this name: {', '.join(keys)}", fix)
            )
        else:
            ends = {path.rpartition(".")[2] for path in known}
            near = difflib.get_close_matches(
                name, [*ends, "model", "data", "validation", "reward", "run_dir", "progress", "backend"], n=3
            )
            fix = f"did you mean {' or '.join(near)}?" if near else "megarl keys WORD finds keys"
            call.faults.append(
                Violation(
                    name,
                    value,
                    "megarl.train has no such argument, and no key of a configuration ends with this name",
                    fix,
                )
            )


def _keys_of(name: str, algorithm: str, inherited: Mapping[str, Any], known: Sequence[str]) -> list[str]:
    if name == "learning_rate":
        # A recipe whose optimizers refer to the shared key would ignore that of one optimizer, or refuse it.
        if at(inherited, _SHARED_LR) is not None:
            return [_SHARED_LR]
        return [_MEGATRON_LR if at(inherited, "policy.megatron_cfg.enabled") else _TORCH_LR]
    if name in known:
        return [name]
    if f"data.{name}" in known:
        return [f"data.{name}"]
    own = algorithm_class(algorithm).section()
    # Prefer the algorithm's own keys, then those of the policy and of the cluster: a person who gives no
    # section means these.
    for section in (f"{own}.", "policy.", "cluster."):
        if f"{section}{name}" in known:
            return [f"{section}{name}"]
    # Exclude keys of data sources, which are given with the data.
    others = (*ALGORITHMS, "data")
    return [path for path in known if path.endswith(f".{name}") and path.partition(".")[0] not in others]


def add_model(call: Call, model: Any) -> None:
    """Write the model into a call: a directory, a hub id, or the model that a run has exported."""
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
    call: Call, arguments: Mapping[str, Any], directory: Path, kind: Any, overrides: Mapping[str, Any]
) -> None:
    """Write the data of ``data`` and ``validation`` into a call.

    Args:
        call: the call.
        arguments: both arguments; None if not given.
        directory: directory that rows are written into.
        kind: ``megarl.data.columns.Kind``.
        overrides: overrides of the call, of which the field keys of data sources are used.
    """
    keys = {name: overrides[name] for name in _SOURCE_KEYS if name in overrides}
    for argument, key in (("data", "data.train"), ("validation", "data.validation")):
        data = arguments[argument]
        if data is None:
            continue
        try:
            source = source_of(argument, data, directory, call.made)
            # A named set has its own fields, and a source as in a configuration may.
            if argument == "data" or source.get("name") not in NAMED_SETS:
                source = {**keys, **source}
            if "path" in source:
                _find_columns(
                    call, argument, source, kind, is_written=not isinstance(data, str | os.PathLike | Mapping)
                )
            call.put(key, source, argument)
        except ConfigError as error:
            call.faults += error.violations


def _find_columns(call: Call, argument: str, source: dict[str, Any], kind: Any, *, is_written: bool) -> None:
    try:
        require_columns(argument, source, kind)
    except ConfigError as error:
        # If the reward function uses only the response, the rows need no reference answers.
        if not is_written or not call.given or any(map(_takes_answer, call.given)):
            raise
        write_empty_answers(source, call.made)
        try:
            require_columns(argument, source, kind)
        except ConfigError:
            # The rows lacked something else than answers: raise the first error.
            raise error from None


def _takes_answer(path: str) -> bool:
    arguments = arguments_of(load_object(path, "env.reward"))
    for name in (*arguments.positional, *arguments.keywords):
        meaning = SEVERAL.get(name) or SINGLE.get(name)
        if meaning in (ANSWER, STATE):
            return True
    return False


def add_rewards(call: Call, reward: Any) -> None:
    """Write rewards into a call: a name, a function, a list of these, or a dictionary of sections of
    ``env.rewards``."""
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


def _section(reward: Any) -> dict[str, Any]:
    return dict(reward) if isinstance(reward, Mapping) else {"reward": reward}


def _sections(rewards: Sequence[Any]) -> Iterator[tuple[str, dict[str, Any]]]:
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
    # An object in a closure may refuse to be pickled with an error of any class.
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
    # Callable objects, and functions of python -c, have no source.
    except (OSError, TypeError):
        call.sources[path] = f"# {function!r}: Python does not know its source\n"
    return path


def require_parameters_in_data(call: Call) -> None:
    """Keep the data columns that reward functions have parameters for, so that the functions receive them."""
    source = at(call.written, "data.train")
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
        # A function that reads the record gets what there is; a parameter needs its column.
        wanted = named & set(columns_of(source)) | (passable_columns(source) - used if reads_all else set())
        if wanted:
            call.default(f"{key}.extra_keys", sorted(wanted))


def add_sizes(call: Call, algorithm: str, num_rows: int | None) -> None:
    """Write sizes for a first try into a call, unless the arguments set them.

    Args:
        call: a call that inherits an algorithm's files.
        algorithm: its name.
        num_rows: rows of the training data; None if unknown.
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
        # Use the largest micro-batch up to 4 that divides the batch.
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
        # A base model gets prompts as they are.
        call.default("policy.tokenizer.chat_template", None)


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes())
    # The code that loads the model will report what is wrong with the file.
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _plain(value: Any) -> Any:
    """Return a value in a form that YAML can represent."""
    if isinstance(value, Mapping):
        return {str(name): _plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return list(map(_plain, value))
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, Enum):
        return _plain(value.value)
    # Convert arrays and numbers of numpy and torch.
    return value.tolist() if callable(getattr(value, "tolist", None)) else value


def _of_no_yaml(value: Any) -> Any:
    """Return the first part of a value that YAML cannot represent; None if there is none."""
    # Compare types exactly, because YAML does not support subclasses.
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
