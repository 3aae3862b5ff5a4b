"""Environments, rewards and tools in the configuration: their schema, and checks that need no generation."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Annotated, Any, Literal, NotRequired, cast

from typing_extensions import TypedDict

from megarl.config.nested import at
from megarl.config.reward_arguments import describe_faults, known_names
from megarl.errors import ConfigError, Violation
from megarl.import_path import is_import_path, load_object
from megarl.key import ABOVE_0, AT_LEAST_1, Key, Range, fields_of, keys_of, section_types

REWARD, ENVIRONMENT = "env.reward", "env.environment"
SINGLE_TURN, TOOLS = "single_turn", "tools"
REWARDED = (SINGLE_TURN, TOOLS)
"""Values of ``environment`` with which reward functions score the responses."""
OF_TOOLS = ("tools", "max_tool_calls")
"""Keys that only ``environment: tools`` reads; a rule refuses them in other environments."""
TOOL_KINDS = ("calculator", "python", "search", "http")
# ``megarl.rollout.tools.parsers`` asserts that it has these parsers in this order. Keep ``tool_parser`` in
# step.
TOOL_PARSERS = ("hermes", "qwen3_coder", "llama3", "mistral", "deepseek", "gpt-oss")


class RewardOptions(TypedDict):
    """Options of the built-in reward functions; an option that the chosen function does not read is
    refused."""

    math_verify_impl: NotRequired[
        Annotated[
            Literal["hf_math_verify", "dapo_math_verify"],
            Key(
                "`math`: `hf_math_verify` (default) compares the values of the expressions with "
                "math-verify, `dapo_math_verify` compares the text after the last ``Answer:``, as DAPO "
                "does."
            ),
        ]
    ]
    gsm8k_method: NotRequired[
        Annotated[
            Literal["strict", "flexible"],
            Key(
                "`gsm8k`: which number of a response is compared: `strict` (default) the one after the "
                "last ``####``, `flexible` the last one."
            ),
        ]
    ]
    pattern: NotRequired[
        Annotated[
            str,
            Key(
                "``format``: regular expression that the whole response must match; a dot matches line "
                "breaks too. When absent, the response must be one ``<think>...</think>``, which the prompt "
                "may have opened, followed by an answer."
            ),
        ]
    ]
    url: NotRequired[
        Annotated[str, Key("``http``: address of the scoring service, ``http://`` or ``https://``.")]
    ]
    attempts: NotRequired[
        Annotated[
            int,
            Key(
                "`http`: maximum number of requests to score one response (default 3), all within "
                "``timeout_s``.",
                Range(low=1, high=20),
            ),
        ]
    ]
    code_timeout_s: NotRequired[
        Annotated[
            float,
            Key(
                "`code`: time limit in seconds for one test (default 4); ``timeout_s`` limits all tests of "
                "a response together.",
                ABOVE_0,
            ),
        ]
    ]
    memory_mb: NotRequired[
        Annotated[
            int,
            Key(
                "`code`: memory limit in MiB: address space of each process, and resident memory of all "
                "processes of a program together (default 512).",
                AT_LEAST_1,
            ),
        ]
    ]
    max_processes: NotRequired[
        Annotated[
            int,
            Key(
                "`code`: maximum number of processes and threads that a program may have at a time (default "
                "16).",
                AT_LEAST_1,
            ),
        ]
    ]
    max_file_mb: NotRequired[
        Annotated[
            int,
            Key(
                "`code`: maximum size in MiB of a file that a program writes, and in the sandbox of all its "
                "files together (default 16).",
                AT_LEAST_1,
            ),
        ]
    ]
    partial: NotRequired[
        Annotated[
            bool,
            Key(
                "``code``: true scores the share of the tests that pass, and gives each test an equal part "
                "of ``timeout_s``; absent or false scores 1 if all tests pass, else 0."
            ),
        ]
    ]
    isolation: NotRequired[
        Annotated[
            Literal["required", "preferred"],
            Key(
                "``code``: what to do if neither Linux namespaces nor bubblewrap are available, without "
                "which programs that the model wrote could reach the network, read the expected outputs, "
                "write files and end other processes. ``required`` (default) refuses to start; "
                "``preferred`` runs the programs with the other limits only, and warns."
            ),
        ]
    ]
    max_response_length: NotRequired[
        Annotated[
            int,
            Key(
                "``overlong``, ``length``: maximum response length in tokens, by which the reward is "
                "computed.",
                AT_LEAST_1,
            ),
        ]
    ]
    overlong_buffer_length: NotRequired[
        Annotated[
            int,
            Key(
                "``overlong``: number of tokens before ``max_response_length`` over which the reward falls "
                "linearly from 0 to -1.",
                AT_LEAST_1,
            ),
        ]
    ]


class RewardConfig(RewardOptions):
    """One of several rewards of an environment. The options of its function are keys of this section too."""

    reward: NotRequired[
        Annotated[
            str,
            Key(
                "reward function, as in ``env.reward``; when absent, the function with the name of this "
                "section."
            ),
        ]
    ]
    weight: NotRequired[Annotated[float, Key("weight of this reward in the sum of the rewards (default 1).")]]
    strip: NotRequired[
        Annotated[
            bool,
            Key(
                "ignore leading and trailing white space when texts are compared; ``env.strip`` when absent."
            ),
        ]
    ]
    timeout_s: NotRequired[
        Annotated[
            float,
            Key(
                "time limit in seconds for this reward of one response; ``env.timeout_s`` when absent.",
                ABOVE_0,
            ),
        ]
    ]


class ToolConfig(TypedDict):
    """Tool that the policy may call; the name of the section is the name of the tool."""

    tool: NotRequired[
        Annotated[
            str,
            Key(
                "``calculator``: evaluates arithmetic; ``python``: runs code in a closed sandbox, which "
                "keeps its variables for later calls of the conversation; ``search``: searches "
                "``documents``; ``http``: sends the arguments as JSON to ``url``; or the import path of a "
                "function with annotated parameters and a docstring. When absent, the name of this section."
            ),
        ]
    ]
    description: NotRequired[
        Annotated[str, Key("description of the tool that the policy reads, in place of the tool's own.")]
    ]
    documents: NotRequired[
        Annotated[
            str,
            Key(
                "`search`: path of a JSON-lines file with one document per line: ``text``, and optionally "
                "``title``."
            ),
        ]
    ]
    results: NotRequired[
        Annotated[int, Key("`search`: number of documents returned per call (default 3).", AT_LEAST_1)]
    ]
    url: NotRequired[Annotated[str, Key("``http``: address of the service, ``http://`` or ``https://``.")]]
    timeout_s: NotRequired[
        Annotated[float, Key("`http`, `python`: time limit in seconds for one call (default 10).", ABOVE_0)]
    ]
    memory_mb: NotRequired[
        Annotated[
            int, Key("``python``: memory limit in MiB, as for the reward ``code`` (default 512).", AT_LEAST_1)
        ]
    ]
    isolation: NotRequired[
        Annotated[
            Literal["required", "preferred"],
            Key(
                "``python``: ``required`` (default) refuses to start without a sandbox, ``preferred`` runs "
                "without it and warns, as for the reward ``code``."
            ),
        ]
    ]


TOOL_OPTIONS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "calculator": (),
        "python": ("timeout_s", "memory_mb", "isolation"),
        "search": ("documents", "results"),
        "http": ("url", "timeout_s"),
    }
)
"""Built-in tool -> keys of its section that it reads."""


class EnvConfig(RewardOptions):
    """Environment that scores responses. A section inside it with another name, ``env.math: {...}``, is an
    environment of that name with the same keys.

    A named environment inherits the keys after ``rewards`` from here, except ``options``. The ``env_name``
    (or ``task_name``) of a record selects its environment; if only one environment has a name, all records
    use it. An environment named like a built-in reward uses that reward unless it sets another.
    """

    environment: NotRequired[
        Annotated[
            str,
            Key(
                "``single_turn``: a reward function compares one response with the reference answer; "
                "``tools``: the same after a conversation in which the policy may call ``tools``; or the "
                "import path of a class, ``path/to/file.py:Name`` or ``package.module:Name``, see "
                "``megarl.rollout.message_env``.",
                default="single_turn",
            ),
        ]
    ]
    reward: NotRequired[
        Annotated[
            str | None,
            Key(
                "reward function: ``exact_match``, ``math`` (or ``math_verify``), ``gsm8k``, "
                "``multichoice``, ``code``, ``format``, ``length``, ``overlong``, ``http``, or an import "
                "path, ``path/to/file.py:function``, see ``megarl.rollout.rewards``. null if ``rewards`` "
                "lists several, or if the environment computes its own reward.",
                default=None,
            ),
        ]
    ]
    rewards: NotRequired[
        Annotated[
            dict[str, RewardConfig] | None,
            Key(
                "several reward functions, by user-chosen names; the reward of a response is their weighted "
                "sum.",
                default=None,
            ),
        ]
    ]
    strip: NotRequired[
        Annotated[
            bool,
            Key(
                "ignore leading and trailing white space when texts are compared (``exact_match``).",
                default=True,
            ),
        ]
    ]
    keep_special_tokens: NotRequired[
        Annotated[
            bool,
            Key(
                "pass responses to reward functions with their special tokens (of Harmony responses, all "
                "messages); false passes the text without special tokens (of Harmony responses, the last "
                "message of the final channel).",
                default=False,
            ),
        ]
    ]
    processes: NotRequired[
        Annotated[
            int | None,
            Key(
                "number of processes that compute rewards which may fail or take long; null for the number "
                "of the driver's CPU cores, at most 8.",
                AT_LEAST_1,
                default=None,
            ),
        ]
    ]
    num_workers: NotRequired[
        Annotated[int, Key("NeMo-RL's name for ``processes``, used if ``processes`` is absent.", AT_LEAST_1)]
    ]
    timeout_s: NotRequired[
        Annotated[
            float,
            Key(
                "time limit in seconds for a reward function to score one response; see ``on_timeout``.",
                ABOVE_0,
                default=5.0,
            ),
        ]
    ]
    on_error: NotRequired[
        Annotated[
            Literal["raise", "zero", "mask"],
            Key(
                "what happens to a response on which the reward function raises, returns no finite number "
                "or crashes: ``zero`` scores it 0; ``mask`` leaves it out of training (a policy may then "
                "learn to break the function); ``raise`` ends the run. Failures that no response can cause "
                "(a scoring service that does not reply, a process killed from outside, a failed import, a "
                "machine out of memory) leave the response out, except with ``raise``. The run also ends if "
                "the function fails on every response of a batch, or if three batches in a row get no "
                "score.",
                default="zero",
            ),
        ]
    ]
    on_timeout: NotRequired[
        Annotated[
            Literal["raise", "zero", "mask"],
            Key(
                "what happens to a response whose reward function exceeds ``timeout_s``: ``zero``, ``mask`` "
                "or ``raise``, as in ``on_error``. With ``mask`` a policy may learn to avoid low scores by "
                "causing time-outs.",
                default="zero",
            ),
        ]
    ]
    options: NotRequired[
        Annotated[dict[str, Any], Key("settings passed to a custom environment.", default={})]
    ]
    tools: NotRequired[
        Annotated[
            dict[str, ToolConfig],
            Key("``environment: tools``: the tools that the policy may call, by name.", default={}),
        ]
    ]
    max_tool_calls: NotRequired[
        Annotated[
            int | None,
            Key(
                "``environment: tools``: maximum number of tool calls per conversation; the response that "
                "exceeds it ends the conversation. null for no maximum.",
                AT_LEAST_1,
                default=None,
            ),
        ]
    ]
    threads: NotRequired[
        Annotated[
            int,
            Key(
                "maximum number of ``MessageEnv`` conversations that are in their step at the same time, "
                "each in a thread of its own.",
                AT_LEAST_1,
                default=256,
            ),
        ]
    ]
    step_timeout_s: NotRequired[
        Annotated[
            float,
            Key(
                "time limit in seconds for one ``MessageEnv`` step; a conversation that exceeds it is left "
                "out of training.",
                ABOVE_0,
                default=60.0,
            ),
        ]
    ]
    tool_parser: NotRequired[
        Annotated[
            Literal["hermes", "qwen3_coder", "llama3", "mistral", "deepseek", "gpt-oss"] | None,
            Key(
                "format in which the model writes tool calls, by the model family that uses it; null "
                "without tools.",
                default=None,
            ),
        ]
    ]
    on_bad_call: NotRequired[
        Annotated[
            Literal["observe", "end"],
            Key(
                "what happens if a tool call cannot be parsed, or (with ``environment: tools``) names an "
                "unknown tool: ``observe`` replies with the error, and the conversation goes on; ``end`` "
                "ends the conversation with a score of 0.",
                default="observe",
            ),
        ]
    ]
    on_tool_error: NotRequired[
        Annotated[
            Literal["observe", "end"],
            Key(
                "what happens if a tool, or ``MessageEnv.step``, raises on a response: ``observe`` or "
                "``end``, as in ``on_bad_call``. A failure that no response can cause (a server that is "
                "gone, a process that was killed, a late reply) leaves the conversation out of training. "
                "The run ends if ``MessageEnv.step`` raises on each of the first 256 responses.",
                default="observe",
            ),
        ]
    ]


OPTIONS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "exact_match": ("strip",),
        "math": ("math_verify_impl",),
        "math_verify": ("math_verify_impl",),
        "gsm8k": ("gsm8k_method",),
        "multichoice": (),
        "format": ("pattern",),
        "length": ("max_response_length",),
        "overlong": ("max_response_length", "overlong_buffer_length"),
        "http": ("url", "attempts", "timeout_s"),
        "code": (
            "code_timeout_s",
            "memory_mb",
            "max_processes",
            "max_file_mb",
            "partial",
            "isolation",
            "timeout_s",
        ),
    }
)
"""Built-in reward function -> keys of its section that it reads."""

REQUIRED_OPTIONS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {"length": OPTIONS["length"], "overlong": OPTIONS["overlong"], "http": ("url",)}
)
"""Built-in reward function -> keys of its section that must be set."""

BUILT_IN_REWARDS = tuple(OPTIONS)


def faults_of_schemas(tools: object, key: str, name: str) -> Iterator[Violation]:
    """Yield the faults in the tool schemas that a custom environment gives to the policy.

    Args:
        tools: the environment's ``tools``, of any type.
        key: dotted key that names the environment, for the violations.
        name: value of that key.
    """
    fix = (
        'give {"type": "function", "function": {"name": ..., "description": ..., "parameters": {a JSON '
        "schema of an object}}}"
    )
    if not isinstance(tools, Sequence) or isinstance(tools, str):
        yield Violation(
            key, name, f"its tools are {type(tools).__name__}, not a list", "make tools a list of schemas"
        )
        return
    seen: set[str] = set()
    for place, tool in enumerate(tools):
        declared = tool.get("function") if isinstance(tool, Mapping) else None
        function = declared if isinstance(declared, Mapping) else {}
        parameters, called = function.get("parameters", {"type": "object"}), function.get("name")
        if not isinstance(called, str) or not called:
            yield Violation(key, name, f"tools[{place}] = {repr(tool)[:60]} names no function", fix)
        elif called in seen:
            yield Violation(
                key, name, f"two of its tools are called {called!r}", "give each a name of its own"
            )
        elif not isinstance(parameters, Mapping) or not isinstance(parameters.get("properties", {}), Mapping):
            yield Violation(
                key, name, f"the parameters of its tool {called!r} are not a JSON schema of an object", fix
            )
        seen.add(str(called))


def is_nemo_rl(kind: Any) -> bool:
    """Return whether a class (or the class behind a Ray actor) has the interface of a NeMo-RL environment."""
    return callable(getattr(class_of_actor(kind), "global_post_process_and_metrics", None))


def class_of_actor(kind: Any) -> Any:
    """Return the class behind a Ray actor class. Any other class is returned unchanged."""
    # Recognise an actor by its attribute, because checking a configuration must not import Ray.
    actor = getattr(kind, "__ray_metadata__", None)
    return kind if actor is None else actor.modified_class


def environment_class(name: str, key: str = ENVIRONMENT) -> Callable[..., Any]:
    """Return the environment class at an import path.

    Raises:
        ConfigError: there is no such object, or it lacks a method of an environment.
    """
    kind = load_object(name, key)
    if is_nemo_rl(kind):
        return kind  # megarl.rollout.nemo_rl has the other methods
    missing = [
        method
        for method in ("step", "fault_of_reference", "close")
        if not callable(getattr(kind, method, None))
    ]
    # Recognise MessageEnv's abstract step by its name, because checking a configuration must not import that
    # module.
    if getattr(getattr(kind, "step", None), "__qualname__", None) == "MessageEnv.step":
        missing.append("step")
    if not callable(kind) or missing:
        bound = f"it lacks {', '.join(missing)}" if missing else "it cannot be called"
        raise ConfigError(
            [
                Violation(
                    key,
                    name,
                    bound,
                    "define it; one that derives from megarl.rollout.message_env.MessageEnv needs step alone",
                )
            ]
        )
    return kind


def tool_sections(section: EnvConfig) -> dict[str, ToolConfig]:
    """Return an environment's tools, name -> section, with ``tool`` filled in."""
    return {name: {"tool": name, **inner} for name, inner in (section.get("tools") or {}).items()}


def own_function(name: str, key: str) -> Callable[..., Any]:
    """Return the function at an import path.

    Args:
        name: the import path.
        key: dotted key that has it, for the error.

    Raises:
        ConfigError: there is no such object, or it is not callable.
    """
    function = load_object(name, key)
    if not callable(function):
        bound = f"it is {type(function).__name__}, which cannot be called"
        raise ConfigError([Violation(key, name, bound, "name a function")])
    found: Callable[..., Any] = function
    return found


def faults_of_tools(section: EnvConfig, key: str) -> Iterator[Violation]:
    """Yield the violations in ``tools`` and ``tool_parser`` of one environment.

    Args:
        section: section of the environment, with values of the right types.
        key: its dotted key.
    """
    if not section.get("tools"):
        yield Violation(
            f"{key}.tools",
            section.get("tools"),
            "there are no tools to call",
            "name one: {calculator: {}}",
        )
    if section.get("tool_parser") is None:
        bound = "without it no tool call would be parsed"
        yield Violation(
            f"{key}.tool_parser",
            None,
            bound,
            f"write the form in which the model calls tools: {', '.join(TOOL_PARSERS)}",
        )
    for name, inner in tool_sections(section).items():
        path, kind = f"{key}.tools.{name}", inner["tool"]
        yield from fault_of_name(path, name)
        yield from faults_of_ranges(inner, ToolConfig, path)
        if kind not in TOOL_KINDS and not is_import_path(kind):
            yield Violation(
                f"{path}.tool",
                kind,
                f"it must be {', '.join(TOOL_KINDS)} or an import path",
                "write one, as file.py:function",
            )
            continue
        if kind not in TOOL_KINDS:
            try:
                own_function(kind, f"{path}.tool")
            except ConfigError as error:
                yield from error.violations
        read = {"tool", "description", *TOOL_OPTIONS.get(kind, ())}
        for option in sorted(inner.keys() - read):
            bound = f"the tool {kind} does not read it, so that it would do nothing"
            yield Violation(f"{path}.{option}", at(inner, option), bound, "remove it")
        for option in ("documents", "url"):
            if option in TOOL_OPTIONS.get(kind, ()) and not inner.get(option):
                yield Violation(
                    f"{path}.{option}", inner.get(option), f"the tool {kind} needs it", "write it"
                )


def check_reward(name: object, key: str = REWARD, columns: Collection[str] | None = None) -> None:
    """Check that a reward function exists, and that each of its parameters can get a value.

    Args:
        name: name of a built-in reward function, or an import path.
        key: dotted key that has it, for the error.
        columns: record fields that parameters may be named after (``extra_keys``); None if they are unknown,
            which skips the check of parameters.

    Raises:
        ConfigError: the name is unknown, nothing can be imported, or a parameter gets no value.
    """
    if not isinstance(name, str) or (name not in BUILT_IN_REWARDS and not is_import_path(name)):
        bound = f"it must be {', '.join(BUILT_IN_REWARDS)} or an import path"
        raise ConfigError(
            [Violation(key, name, bound, "write one of those names, or path/to/file.py:function")]
        )
    if not is_import_path(name):
        return
    function = own_function(name, key)
    # Without the record fields, any parameter might be the name of one.
    if columns is None:
        return
    for fault in describe_faults(function, columns):
        fix = (
            f"use these names: {known_names()} (extra_keys of all sources: "
            f"{', '.join(sorted(columns)) or 'none'}); or "
            "give it a default"
        )
        raise ConfigError([Violation(key, name, fault, fix)])


def named_environments(section: Mapping[str, Any]) -> dict[str, EnvConfig]:
    """Return the named environments of an ``env`` section, name -> section. Every subsection that is not one
    of the section's own keys is one."""
    # rewards, options and tools are subsections too, but not environments.
    own = keys_of(EnvConfig)
    return {
        name: cast(EnvConfig, inner)
        for name, inner in section.items()
        if isinstance(inner, Mapping) and name not in own
    }


def environments_of(section: EnvConfig) -> dict[str, EnvConfig]:
    """Return the environments of an ``env`` section, dotted key -> section: the named ones, or the section
    itself if there are none."""
    named = {f"env.{name}": inner for name, inner in named_environments(section).items()}
    return named or {"env": section}


def weights_of_rewards(section: EnvConfig) -> dict[str, float]:
    """Return the weight of each reward under ``rewards``, by name, over all environments."""
    weights = {}
    for inner in environments_of(section).values():
        for name, reward in (inner.get("rewards") or {}).items():
            weights[name] = reward.get("weight", 1.0)
    return weights


def rewards_of(section: EnvConfig, key: str = "env") -> dict[str, RewardConfig]:
    """Return the rewards of one environment, dotted key -> section with ``reward``, ``strip`` and
    ``timeout_s`` filled in. Without ``rewards``, this is the environment's own section."""
    several = section.get("rewards")
    if several is None:
        return {key: cast(RewardConfig, section)}
    # Keys of the reward itself override these; its name is the default of ``reward``.
    shared: Any = {name: section[name] for name in ("strip", "timeout_s") if name in section}
    return {
        f"{key}.rewards.{name}": cast(RewardConfig, {"reward": name, **shared, **inner})
        for name, inner in several.items()
    }


def fault_of_name(key: str, name: str) -> Iterator[Violation]:
    """Yield a violation if a user-chosen name has characters that metric names cannot contain."""
    if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_-]*", name):
        yield Violation(
            key,
            name,
            "a name has only letters, digits, - and _, and begins with a letter",
            "give it another name",
        )


def faults_of_ranges(section: Mapping[str, Any], kind: Any, key: str) -> Iterator[Violation]:
    """Yield a violation for each number of a section that is out of bounds. The general rule does not find
    sections under user-chosen names and in lists, so their rules call this.

    Args:
        section: the section, with values of the right types.
        kind: its TypedDict.
        key: its dotted key.
    """
    for name, field in fields_of(kind).items():
        value = section.get(name)
        if value is not None and field.bounds is not None and not field.bounds.holds(value):
            yield Violation(
                f"{key}.{name}", value, f"it must be {field.bounds}", f"write a value that is {field.bounds}"
            )
    for name, annotation in keys_of(kind).items():
        for inner in section_types(annotation):
            if isinstance(section.get(name), Mapping):
                yield from faults_of_ranges(section[name], inner, f"{key}.{name}")


def faults_of_rewards(
    section: EnvConfig, key: str = "env", columns: Collection[str] = ()
) -> Iterator[Violation]:
    """Yield the violations in the rewards of one environment.

    Args:
        section: section of the environment, with values of the right types.
        key: its dotted key.
        columns: fields that every record of the environment passes on (``extra_keys``).
    """
    several = section.get("rewards")
    if several is not None:
        if section.get("reward") is not None:
            fix = "write one of the two"
            yield Violation(f"{key}.reward", section["reward"], f"{key}.rewards names rewards too", fix)
        if not several:
            yield Violation(
                f"{key}.rewards", several, "it names no reward", "name at least one, or write reward"
            )
        elif all(inner.get("weight", 1.0) == 0 for inner in several.values()):
            yield Violation(
                f"{key}.rewards",
                several,
                "all weights are 0, so that no response would get a reward",
                "give one a weight",
            )
        for name, inner in several.items():
            yield from fault_of_name(f"{key}.rewards.{name}", name)
            yield from faults_of_ranges(inner, RewardConfig, f"{key}.rewards.{name}")
        bound = f"{key}.rewards is given, and each of its rewards has its own options"
        for option in sorted(keys_of(RewardOptions).keys() & section.keys()):
            yield Violation(f"{key}.{option}", at(section, option), bound, "move it there")
    for path, reward in rewards_of(section, key).items():
        yield from _faults_of_reward(reward, path, columns)


def _faults_of_reward(reward: RewardConfig, key: str, columns: Collection[str]) -> Iterator[Violation]:
    name = reward.get("reward")
    try:
        check_reward(name, f"{key}.reward", columns)
    except ConfigError as error:
        yield from error.violations
        return
    read = OPTIONS.get(str(name), ())
    for option in keys_of(RewardOptions):
        if option in reward and option not in read:
            yield Violation(
                f"{key}.{option}", at(reward, option), f"the reward {name!r} does not read it", "remove it"
            )
    for option in REQUIRED_OPTIONS.get(str(name), ()):
        if option not in reward:
            yield Violation(f"{key}.{option}", None, f"the reward {name!r} needs it", "add it")
    yield from _faults_of_options(reward, key)


def _faults_of_options(reward: RewardConfig, key: str) -> Iterator[Violation]:
    longest, buffer = reward.get("max_response_length"), reward.get("overlong_buffer_length")
    if longest is not None and buffer is not None and buffer > longest:
        bound = f"it is longer than the longest response, max_response_length = {longest}"
        yield Violation(f"{key}.overlong_buffer_length", buffer, bound, f"write {longest} or less")
    if reward.get("pattern") is not None:
        try:
            re.compile(reward["pattern"])
        except re.error as error:
            yield Violation(
                f"{key}.pattern",
                reward["pattern"],
                f"it is not a valid regular expression: {error}",
                "correct it",
            )
    url = reward.get("url")
    if url is not None and not re.match(r"https?://[^/\s]+", url):
        yield Violation(
            f"{key}.url", url, "it must be an http or https address", "write http://host:port/path"
        )
