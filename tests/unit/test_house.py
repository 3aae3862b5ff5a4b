"""Habits of the whole code base that no linter rule covers, checked on the syntax tree of every library
module."""

from __future__ import annotations

import ast
import functools
import importlib
import re
import subprocess
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any

import pytest

from megarl.config.algorithms import ALGORITHMS, built_in_models, run_type
from megarl.config.schema import keys_of, known_paths, section_types
from megarl.key import NO_DEFAULT, fields_of

ROOT = Path(__file__).parents[2]
MODULES = sorted(path for package in ("megarl", "converters") for path in (ROOT / package).rglob("*.py"))
# These talk to a person: what they say is their result.
SPEAKERS = {"megarl/cli.py", "converters/cli.py", "converters/__main__.py"}
# "environ" and its byte twin as attributes of os, and the functions that read or write the same thing.
ENVIRONMENT = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}
# Readers that run code found in a file. The dictionary names the modules whose functions of that name are
# meant.
CODE_READERS = {
    ("torch", "load"),
    ("pickle", "load"),
    ("pickle", "Unpickler"),
    ("dill", "load"),
    ("cloudpickle", "load"),
    ("joblib", "load"),
}
# Two screens of 110 columns.
LONGEST_FUNCTION = 92


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def uses_of_environment(tree: ast.AST) -> Iterator[int]:
    """Lines that touch the process environment, as an attribute of os or imported from it."""
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and node.value.id == "os"
            and node.attr in ENVIRONMENT
        ):
            yield node.lineno
        if (
            isinstance(node, ast.ImportFrom)
            and node.module == "os"
            and ENVIRONMENT & {alias.name for alias in node.names}
        ):
            yield node.lineno


def uses_of_parallel_state(tree: ast.AST) -> Iterator[int]:
    """Lines that import Megatron's module of global process groups or anything in it, or reach it by
    attribute."""
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Attribute):
            names = [node.attr]
        if any("parallel_state" in name.split(".") for name in names):
            yield node.lineno


def prints(tree: ast.AST) -> Iterator[int]:
    """Lines that call the built-in print."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print":
            yield node.lineno


def reads_of_code(tree: ast.AST) -> Iterator[int]:
    """Lines that read a file in a format which can run code."""
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and (node.value.id, node.attr) in CODE_READERS
        ):
            yield node.lineno
        if isinstance(node, ast.ImportFrom) and any(
            (node.module, alias.name) in CODE_READERS for alias in node.names
        ):
            yield node.lineno


def trusts(tree: ast.AST) -> Iterator[int]:
    """Lines that switch ``trust_remote_code`` on without asking the configuration: keyword, parameter
    default, dictionary or assignment."""

    def is_true(node: ast.AST | None) -> bool:
        return isinstance(node, ast.Constant) and node.value is True

    for node in ast.walk(tree):
        if isinstance(node, ast.keyword) and node.arg == "trust_remote_code" and is_true(node.value):
            yield node.value.lineno
        if isinstance(node, ast.Dict):
            for key, value in zip(node.keys, node.values, strict=True):
                if isinstance(key, ast.Constant) and key.value == "trust_remote_code" and is_true(value):
                    yield value.lineno
        if isinstance(node, ast.arguments):
            positional = [*node.posonlyargs, *node.args]
            pairs = [
                *zip(reversed(positional), reversed(node.defaults), strict=False),
                *zip(node.kwonlyargs, node.kw_defaults, strict=True),
            ]
            yield from (
                argument.lineno
                for argument, default in pairs
                if argument.arg == "trust_remote_code" and is_true(default)
            )
        if (
            isinstance(node, ast.Assign)
            and is_true(node.value)
            and "trust_remote_code" in {ast.unparse(target).split(".")[-1] for target in node.targets}
        ):
            yield node.lineno


def wall_clocks(tree: ast.AST) -> Iterator[int]:
    """Lines that ask what time it is: a clock that somebody may set back, so that nothing may be measured or
    waited for by it."""
    clocks = {("time", "time"), ("time", "time_ns"), ("datetime", "now"), ("datetime", "utcnow")}
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Attribute)
            and (ast.unparse(node.value).rpartition(".")[2], node.attr) in clocks
        ):
            yield node.lineno
        if isinstance(node, ast.ImportFrom) and any(
            (node.module, alias.name) in clocks for alias in node.names
        ):
            yield node.lineno


def reads_of_model_configs(tree: ast.AST) -> Iterator[int]:
    """Lines that let transformers read a model's config by itself."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and ast.unparse(node).endswith("AutoConfig.from_pretrained"):
            yield node.lineno


RAY_WAITS = {"put", "get", "wait", "kill", "nodes", "cluster_resources", "available_resources"}


def calls_of_ray(tree: ast.AST) -> Iterator[int]:
    """Lines that call what waits for a process of Ray, or start a task or an actor."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        of_ray = isinstance(node.func.value, ast.Name) and node.func.value.id == "ray"
        if (of_ray and node.func.attr in RAY_WAITS) or (node.func.attr == "remote" and not of_ray):
            yield node.lineno


def long_functions(tree: ast.AST) -> Iterator[int]:
    """First lines of functions that do not fit two screens."""
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            and (node.end_lineno or 0) - node.lineno + 1 > LONGEST_FUNCTION
        ):
            yield node.lineno


RULES = {
    "the environment is read in megarl/env.py only": (uses_of_environment, {"megarl/env.py"}),
    "process groups are passed as arguments; parallel_state is read in one module": (
        uses_of_parallel_state,
        {"megarl/models/megatron/parallel.py"},
    ),
    "library modules log, they do not print": (prints, SPEAKERS),
    "files that can run code are read in one module, restricted": (
        reads_of_code,
        {"converters/files/restricted.py"},
    ),
    "remote code is trusted only where the configuration says so": (trusts, set()),
    "time is measured by monotonic clocks; the wall clock is for people and for files of others": (
        wall_clocks,
        {
            "megarl/run/time_left.py",
            "megarl/data/table.py",
            "megarl/observe/launches.py",
            "megarl/observe/sinks.py",
            "megarl/watch/run_state.py",
        },
    ),
    "configs of models are read in one module, which knows the families that transformers calls otherwise": (
        reads_of_model_configs,
        {"converters/families/hf_config.py", "megarl/parity/reference.py"},
    ),
    "calls of Ray go through one module, which gives them a bound in time": (
        calls_of_ray,
        {"megarl/distributed/ray_calls.py", "megarl/distributed/worker_groups.py"},
    ),
    f"no function is longer than {LONGEST_FUNCTION} lines": (long_functions, set()),
}


@pytest.mark.parametrize("rule", RULES)
def test_every_module_keeps_the_rule(rule: str) -> None:
    finder, exempt = RULES[rule]
    found = [
        f"{name_of(path)}:{line}"
        for path in MODULES
        if name_of(path) not in exempt
        for line in finder(parsed(path))
    ]
    assert not found, f"{rule}, but see {', '.join(found)}"


@pytest.mark.parametrize("rule", RULES)
def test_exempt_files_exist_and_need_the_exemption(rule: str) -> None:
    finder, exempt = RULES[rule]
    for name in exempt - SPEAKERS:
        assert list(finder(parsed(ROOT / name))), f"{name} needs no exemption from: {rule}"


@pytest.mark.parametrize(
    ("finder", "source", "lines"),
    [
        (uses_of_environment, "import os\nos.environ['A']\nos.getenv('A')\nos.path.join('a')\n", [2, 3]),
        (uses_of_environment, "from os import path\nfrom os import environ as e\n", [2]),
        (
            uses_of_parallel_state,
            "from megatron.core import parallel_state as mpu\nfrom megatron.core import mpu\n",
            [1],
        ),
        (
            uses_of_parallel_state,
            "import megatron.core.parallel_state\nfrom megatron.core.parallel_state import get_rank\n",
            [1, 2],
        ),
        (uses_of_parallel_state, "import megatron.core as m\nm.parallel_state.get_rank()\n", [2]),
        (prints, "console.print('a')\nprint('b')\n", [2]),
        (
            reads_of_code,
            "json.load(f)\ntorch.load(f)\npickle.dumps(x)\npickle.load(f)\nfrom torch import load\n",
            [2, 4, 5],
        ),
        (
            trusts,
            "f(trust_remote_code=True)\nf(trust_remote_code=False)\nd = {'trust_remote_code': True}\n",
            [1, 3],
        ),
        (
            trusts,
            "def f(a, trust_remote_code=True): ...\ndef g(*, trust_remote_code: bool = True): ...\n",
            [1, 2],
        ),
        (
            trusts,
            (
                "def f(trust_remote_code, other=True): ...\nself.trust_remote_code = "
                "True\ntrust_remote_code = "
                "False\n"
            ),
            [2],
        ),
        (
            wall_clocks,
            "time.monotonic()\nf(clock=time.time)\ndatetime.datetime.now()\nfrom time import time\n",
            [2, 3, 4],
        ),
        (
            reads_of_model_configs,
            "AutoConfig.for_model(a)\ntransformers.AutoConfig.from_pretrained(a)\n",
            [2],
        ),
        (
            calls_of_ray,
            "ray.put(a)\nray.remote(f)\nf.remote(a)\nray_calls.put(a)\nray.wait([a])\n",
            [1, 3, 5],
        ),
        (
            long_functions,
            "def f():\n"
            + "    a = 1\n" * (LONGEST_FUNCTION - 1)
            + "def g():\n"
            + "    a = 1\n" * LONGEST_FUNCTION,
            [LONGEST_FUNCTION + 1],
        ),
    ],
)
def test_the_rules_see_what_they_forbid(finder: object, source: str, lines: list[int]) -> None:
    assert callable(finder)
    assert sorted(finder(ast.parse(source))) == lines


SHORT = 100
"""Lines below which a module is a piece of another one, unless several others use it."""

PLUG_INS = {
    "families, named sets of data and the modules that vLLM, a configuration or a program names": {
        "converters.families.",
        "megarl.data.sets.",
        "megarl.models.generation.vllm.executor",
        "megarl.models.generation.vllm.worker_extension",
        "megarl.parity.preload",
    },
    "the NeMo-RL policy API prescribes where these lie": {
        "megarl.models.policy.megatron_policy_worker",
        "megarl.models.policy.fsdp1_policy_worker",
        "megarl.algorithms.utils",
    },
    "the kind of an engine, which loads neither torch nor Ray, names what does": {
        "megarl.models.generation.vllm.generation"
    },
    "tools that a policy may call, a file each": {"megarl.rollout.tools."},
    "sub-commands, and what the command line hands to the converters": {
        "megarl.doctor.command",
        "megarl.parity.converted",
    },
}


def importers() -> dict[str, set[str]]:
    """The modules of the library, each with those that import it."""
    names = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
        for path in MODULES
    }
    found: dict[str, set[str]] = {name: set() for name in names}
    for name, path in names.items():
        for target in imported(parsed(path)):
            module = target if target in found else target.rpartition(".")[0]
            if module in found and module != name:
                found[module].add(name)
    return found


def imported(tree: ast.AST) -> Iterator[str]:
    """Dotted names that a module imports."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_a_short_module_has_several_importers() -> None:
    """A piece with one client lies with its client; length itself is no fault."""
    exempt = tuple(name for names in PLUG_INS.values() for name in names)
    short = {
        name
        for name, clients in importers().items()
        if len(clients) == 1
        and lines_of(name) < SHORT
        and not name.endswith("__main__")
        and not name.startswith(exempt)
    }
    assert not short, (
        f"put them into the module that imports them, or name their kind in PLUG_INS: {sorted(short)}"
    )


def test_imports_form_no_circle() -> None:
    """Also those for types alone, and inside functions: modules of a circle cannot be read one after the
    other."""
    try:
        TopologicalSorter(importers()).prepare()
    except CycleError as error:
        raise AssertionError(f"these import one another: {' <- '.join(error.args[1])}") from None


def lines_of(name: str) -> int:
    path = ROOT.joinpath(*name.split("."))
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return SHORT if path.name == "__init__.py" else len(path.read_text(encoding="utf-8").splitlines())


@functools.cache
def keys_with_defaults() -> frozenset[str]:
    """Names of all configuration keys that something fills in."""

    def names(section: Any) -> Iterator[str]:
        yield from (name for name, key in fields_of(section).items() if key.default is not NO_DEFAULT)
        for annotation in keys_of(section).values():
            for inner in section_types(annotation):
                yield from names(inner)

    return frozenset(names(run_type(None)))


def repeated_defaults(tree: ast.AST) -> Iterator[int]:
    """Lines that give a configuration key a default which stands at its field."""
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr == "get"
            and len(node.args) == 2
        ):
            key, default = node.args
            if (
                isinstance(key, ast.Constant)
                and key.value in keys_with_defaults()
                and isinstance(default, ast.Constant)
            ):
                yield node.lineno


def test_no_worker_repeats_a_default() -> None:
    assert list(
        repeated_defaults(ast.parse("a.get('temperature', 1.0)\na.get('temperature')\na.get('nobody', 1)\n"))
    ) == [1]
    # of a parameter group of torch, whose key has the same name
    other_keys = {"megarl/models/huggingface/optimizer.py"}
    found = {
        name_of(path)
        for path in MODULES
        if "/models/" in name_of(path) and list(repeated_defaults(parsed(path)))
    }
    assert found == other_keys, "index the key: complete_policy has filled it in"


# What reads a configuration before it is known to be of the right shape, so that no type says anything of it.
UNCHECKED = {
    "megarl/cli.py",
    # config.json of models
    "megarl/config/model_facts.py",
    "megarl/models/generation/vllm/configuration.py",
    "megarl/models/generation/vllm/options.py",
    "megarl/library/arguments.py",
    "megarl/library/rows.py",
    "megarl/parity/settings.py",
    "megarl/quickstart/__main__.py",
    "megarl/watch/configured.py",
    *(
        f"megarl/config/{name}.py"
        for name in ("defaults", "load", "models", "other_trainers", "places", "proposals", "reference")
    ),
    *(
        f"megarl/config/{name}.py"
        for name in ("resume_changes", "schema", "validate", "rules/__init__", "rules/models", "rules/view")
    ),
}
# Names of variables that hold a configuration or one of its sections.
SECTIONS = {
    *(
        "config",
        "run_config",
        "cfg",
        "policy",
        "megatron",
        "dtensor",
        "generation",
        "section",
        "settings",
        "source",
        "loss",
    ),
    *(
        "cluster",
        "optimizer",
        "scheduler",
        "reward",
        "env",
        "packing",
        "dynamic",
        "deadlines",
        "checkpointing",
        "logger_config",
    ),
    "tokenizer_config",
}
LOOSE = re.compile(r"\b(Mapping|dict)\[str, (Any|object)\]|\bConfig\b")
MOST_LOOSE, MOST_GETS = 7, 151


def last_name(node: ast.AST) -> str:
    """The variable, attribute or key at the end of an expression, without underscores before it."""
    found = node.slice if isinstance(node, ast.Subscript) else node
    name = (
        getattr(found, "id", None)
        or getattr(found, "attr", None)
        or getattr(found, "value", None)
        or getattr(found, "arg", "")
    )
    return str(name).lstrip("_").removesuffix("_cfg")


def loose_sections(tree: ast.AST) -> Iterator[int]:
    """Lines that declare a section of a configuration whose keys mypy does not know."""
    for node in ast.walk(tree):
        target = node if isinstance(node, ast.arg) else getattr(node, "target", None)
        annotation = getattr(node, "annotation", None)
        if (
            target is not None
            and annotation is not None
            and last_name(target) in SECTIONS
            and LOOSE.search(ast.unparse(annotation))
        ):
            yield node.lineno


def gets(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Lines with a key that is asked of a section by ``get``: of a key that no section has, mypy says nothing
    there."""
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr == "get"
            and node.args
        ):
            key = node.args[0]
            if (
                isinstance(key, ast.Constant)
                and isinstance(key.value, str)
                and last_name(node.func.value) in SECTIONS
            ):
                yield node.lineno, key.value


def checked_modules() -> dict[str, ast.Module]:
    """Modules that read configurations of the right shape."""
    return {
        name_of(path): parsed(path)
        for path in MODULES
        if name_of(path).startswith("megarl") and name_of(path) not in UNCHECKED
    }


@functools.cache
def paths_of_configurations() -> frozenset[str]:
    """Dotted paths of all keys, of models beside the policy too."""
    found = {path for name in ALGORITHMS for path in known_paths(run_type(name))}
    of_policy = {path.removeprefix("policy") for path in found if path.startswith("policy.")}
    return frozenset(found | {f"{model}{path}" for model in built_in_models() for path in of_policy})


def dotted_texts(path: Path) -> Iterator[tuple[int, str]]:
    """Texts of several words with dots between them; of the configuration's own modules, texts that are made
    of constants too."""
    name = name_of(path)
    constants: Any = {}
    if name.startswith("megarl/config/"):
        constants = vars(
            importlib.import_module(name.removesuffix(".py").removesuffix("/__init__").replace("/", "."))
        )

    def text_of(node: ast.AST) -> str:
        if isinstance(node, ast.JoinedStr):
            return "".join(map(text_of, node.values))
        found = (
            constants.get(ast.unparse(node.value))
            if isinstance(node, ast.FormattedValue)
            else getattr(node, "value", None)
        )
        return found if isinstance(found, str) else "?"

    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Constant | ast.JoinedStr) and re.fullmatch(
            r"\w+(\.\w+)+(?<!\.yaml)", text_of(node)
        ):
            yield node.lineno, text_of(node)


def test_configuration_that_is_checked_has_types() -> None:
    source = (
        "def f(config: Mapping[str, Any], row: dict[str, Any]): ...\nself._policy: Config = {}\na: "
        "RunConfig = {}\n"
    )
    assert sorted(loose_sections(ast.parse(source))) == [1, 2]
    assert list(gets(ast.parse("self._policy.get('a')\np['megatron_cfg'].get('b')\nrow.get('c')\n"))) == [
        (1, "a"),
        (2, "b"),
    ]
    checked = checked_modules()
    loose = [f"{name}:{line}" for name, tree in checked.items() for line in loose_sections(tree)]
    assert len(loose) <= MOST_LOOSE, f"name the TypedDict of the section (megarl.config): {loose}"
    asked = [f"{name}:{line}" for name, tree in checked.items() for line, _ in gets(tree)]
    assert len(asked) <= MOST_GETS, f"index a key that has a default: {asked}"


def test_keys_that_the_code_names_exist() -> None:
    words = {word for path in paths_of_configurations() for word in path.split(".")}
    unknown = [
        f"{name}:{line}: {key}"
        for name, tree in checked_modules().items()
        for line, key in gets(tree)
        if key not in words
    ]
    assert not unknown
    # of keys of other trainers, which are translated, and of fields of records
    others = ("megarl/config/other_trainers.py", "megarl/data/")
    free = re.compile(r"policy\.optimizer\.kwargs\.\w+|cluster\.for_training")
    first = {path.partition(".")[0] for path in paths_of_configurations()}
    for path in MODULES:
        name = name_of(path)
        for line, text in (
            dotted_texts(path) if name.startswith("megarl") and not name.startswith(others) else ()
        ):
            if text.partition(".")[0] in first:
                known = text in paths_of_configurations() or free.fullmatch(text)
                assert known, f"{name}:{line}: no configuration has the key {text}"


def test_every_module_says_its_one_job() -> None:
    silent = [
        name_of(path) for path in MODULES if path.stat().st_size and not ast.get_docstring(parsed(path))
    ]
    assert not silent


# a run starts Ray before it loads them: Ray's processes take as long to come up
LIGHT = [
    "megarl",
    "megarl.errors",
    "megarl.env",
    "megarl.config.validate",
    "megarl.config.load",
    "megarl.cli",
    "megarl.run.run",
]


@pytest.mark.parametrize("module", LIGHT)
def test_what_checks_a_configuration_loads_no_heavy_library(module: str) -> None:
    code = (
        f"import sys, {module}; print(sorted({{'torch', 'ray', 'megatron', 'transformers'}} & "
        "set(sys.modules)))"
    )
    answer = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout.strip() == "[]"


def test_every_room_has_a_place_in_the_import_layers() -> None:
    text = (ROOT / ".importlinter").read_text(encoding="utf-8")
    layers = set(text.split("layers =\n")[1].split("\n\n")[0].replace(":", " ").replace("|", " ").split())
    for room in ("megarl", "megarl/algorithms", "megarl/models", "megarl/models/policy"):
        for path in sorted((ROOT / room).iterdir()):
            is_module = path.suffix == ".py" and path.name != "__init__.py"
            if not is_module and not (path / "__init__.py").is_file():
                continue
            name = ".".join(path.with_suffix("").relative_to(ROOT).parts)
            assert any(layer == name or layer.startswith(name + ".") for layer in layers), (
                f"{name} is in no layer of .importlinter; add it"
            )
