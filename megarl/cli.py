"""Command line of megarl: subcommands and exit codes."""

from __future__ import annotations

import argparse
import contextlib
import copy
import difflib
import errno
import io
import json
import logging
import os
import re
import resource
import sys
import traceback
from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn

from converters.errors import ConversionError
from megarl import __version__, env
from megarl.errors import WORKER_TRACE, ConfigError, MachineError, MegarlError, Violation
from megarl.redaction import redact_log, redacted_text

if TYPE_CHECKING:
    from megarl.config.sections import Config, RunConfig

logger = logging.getLogger(__name__)

# 128 + SIGINT, as shells report it.
INTERRUPTED = 130
USER_FAULT = 2
_NO_THREAD = "can't start new thread"
# Functions in whose traceback a failed start of a process appears. The system's error alone is ambiguous:
# EAGAIN is also raised for a held lock.
_FORKING = ("_execute_child", "popen_fork", "spawnv_passfds")


class _Parser(argparse.ArgumentParser):
    """Argument parser whose error messages hide secrets. argparse uses the same class for subcommands."""

    def error(self, message: str) -> NoReturn:
        super().error(redacted_text(message))


def build_parser() -> argparse.ArgumentParser:
    """Return the argument parser of ``megarl`` with all subcommands."""
    parser: argparse.ArgumentParser = _Parser(
        prog="megarl", description="Reinforcement learning of language models on Megatron-Core."
    )
    parser.add_argument("--version", action="version", version=f"megarl {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    train = commands.add_parser(
        "train",
        help="run an algorithm",
        usage="megarl train CONFIG [key=value ...] [--with FILE] [--stop-at TIME] [--dry-run [--data]]",
        description="Run the algorithm of a configuration file. An unfinished run resumes from its newest "
        "checkpoint.",
        epilog="Overrides: key.of.section=value sets, +key=value adds, ~key removes a key. SIGTERM, "
        "SIGUSR1, Ctrl-C, a closed terminal or a file stop_requested in the run's directory stop "
        "it after the current step, with a checkpoint; a second Ctrl-C or SIGTERM at once. Exit "
        "codes: 0 done, 2 wrong configuration or data, 3 nodes missing, 4 a worker, a node or Ray "
        "was lost, or something took longer than its deadline, 75 stopped and saved (start it "
        "again), 1 any other failure, 130 interrupted.",
    )
    train.set_defaults(parser=train)
    train.add_argument(
        "config", nargs="?", metavar="CONFIG", help="YAML file, or the name of a recipe (megarl recipes)"
    )
    add_layers(train)
    train.add_argument(
        "--dry-run",
        action="store_true",
        help="check configuration and model, show ranks, batches and memory, and start nothing",
    )
    train.add_argument(
        "--stop-at",
        type=_time,
        metavar="TIME",
        help="save and stop in time before this: 2026-11-26T18:30, or +3:45 for 3 h 45 min from now; in "
        "a Slurm job also before the end of the job, if Slurm reports it (SLURM_JOB_END_TIME)",
    )
    train.add_argument(
        "--data",
        action="store_true",
        help="with --dry-run: check tokenizer, chat template and all records as well",
    )
    add_eval(commands)
    listed = commands.add_parser(
        "recipes",
        help="list the configurations that ship with megarl",
        description="Names that megarl train accepts instead of a file, each with its purpose.",
    )
    listed.add_argument("--json", action="store_true", help="as JSON, with paths")
    keys = commands.add_parser(
        "keys",
        help="search the keys of configurations",
        description="Keys that have all of the words in their names or meanings, with values and defaults; "
        "also the keys that replace other trainers' keys of these names.",
        epilog="Exit codes: 0 some were found, 1 none.",
    )
    keys.add_argument(
        "words", nargs="*", metavar="WORD", help="part of a name or a meaning; without one, all keys"
    )
    add_watch(commands)
    add_parity(commands)
    add_convert(commands)
    parser.set_defaults(commands=commands.choices)
    return parser


def add_eval(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand ``eval``."""
    evaluate = commands.add_parser(
        "eval",
        help="evaluate a model or a checkpoint on the validation sets of a configuration",
        usage="megarl eval CONFIG [key=value ...] [--with FILE] [--model DIR] [--adapter DIR | --checkpoint "
        "DIR] [--json FILE] [--dry-run]",
        description="Sample and score responses to the validation sets of a configuration, without a "
        "trainer: no optimizer, no reference policy, no training data. The metrics are those that a run logs "
        "for these weights, to the last digit if it generates on the same ranks with the same engine.",
        epilog="Overrides are those of megarl train. Exit codes: 0 done, 2 wrong configuration or data, 4 a "
        "worker or a node was lost, or "
        "took longer than its deadline, 1 any other failure, 130 interrupted.",
    )
    evaluate.set_defaults(parser=evaluate)
    evaluate.add_argument(
        "config", nargs="?", metavar="CONFIG", help="YAML file, or the name of a recipe (megarl recipes)"
    )
    add_layers(evaluate)
    evaluate.add_argument(
        "--model", metavar="DIR", help="evaluate this Hugging Face model in place of policy.model_name"
    )
    evaluate.add_argument(
        "--adapter",
        metavar="DIR",
        help="merge this LoRA adapter, a PEFT directory, into the model while it is loaded",
    )
    evaluate.add_argument(
        "--checkpoint",
        metavar="DIR",
        type=Path,
        help="use the weights of this checkpoint of a run, a directory step_N",
    )
    evaluate.add_argument(
        "--json",
        metavar="FILE",
        type=Path,
        help="write the result to this file (default evaluations/NAME.json in the run's directory)",
    )
    evaluate.add_argument(
        "--dry-run",
        action="store_true",
        help="check configuration, model and checkpoint, show the sets, and start nothing",
    )


def add_watch(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommands that inspect runs and machines: ``status``, ``plot``, ``samples`` and
    ``doctor``."""
    status = commands.add_parser(
        "status",
        help="show the status of a run",
        description="Progress, checkpoints, restarts, memory, metrics and the time of each phase of a run, "
        "also while it trains.",
    )
    status.add_argument("run", metavar="RUN", help="directory of the run")
    status.add_argument("--json", action="store_true", help="as JSON")
    status.add_argument(
        "--hashes",
        action="store_true",
        help="read every byte of the newest checkpoint, instead of comparing names and sizes",
    )
    plot = commands.add_parser(
        "plot",
        help="draw the metrics of one run or of several",
        description="One run: pictures and report.html in its directory. Several, or a directory of runs: "
        "comparison.html next to them. The pages need only a browser.",
    )
    plot.add_argument("runs", nargs="+", metavar="RUN", help="directory of a run")
    plot.add_argument("--out", metavar="FILE", help="write the page to this file, and no pictures")
    add_samples(commands)
    doctor = commands.add_parser(
        "doctor",
        help="check this machine: what is installed, what works, and how to get what is missing",
        usage="megarl doctor [--run-dir DIR] [--transformer-engine] [--json]\n"
        "       megarl doctor --nodes [CONFIG [key=value ...] [--with FILE]] [--json]",
        description="Versions, devices, whether packages fit together, a real all-reduce between two "
        "processes, shared memory, limits and, "
        "with --run-dir, the file system; or, with --nodes, a whole Ray cluster.",
        epilog="Exit codes: 0 megarl can work here, 1 something that it needs is missing or does not work.",
    )
    doctor.set_defaults(parser=doctor)
    doctor.add_argument(
        "--run-dir", metavar="DIR", help="also try the file system of this directory; nothing stays behind"
    )
    doctor.add_argument(
        "--transformer-engine",
        action="store_true",
        help="fail if Transformer Engine does not load, as a run with "
        "policy.megatron_cfg.transformer_engine = true does",
    )
    doctor.add_argument("--json", action="store_true", help="as JSON")
    doctor.add_argument(
        "--nodes",
        action="store_true",
        help="check the Ray cluster that RAY_ADDRESS names instead of this machine: its nodes and GPUs "
        "against CONFIG, and an all-reduce "
        "over all ranks",
    )
    doctor.add_argument(
        "config",
        nargs="?",
        metavar="CONFIG",
        help="with --nodes: the run that the cluster is for, as of megarl train",
    )
    add_layers(doctor)


def add_samples(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand ``samples``."""
    samples = commands.add_parser(
        "samples",
        help="show prompts and responses of a run",
        description="Prompts, responses, rewards and lengths that a run has stored in its directory "
        "(logger.samples), of the newest step unless another is given. megarl plot shows them in "
        "report.html, with the same options.",
    )
    samples.add_argument("run", metavar="RUN", help="directory of the run")
    samples.add_argument("--step", type=int, metavar="N", help="samples of this step")
    samples.add_argument(
        "--validation", action="store_true", help="samples of validations, not of training steps"
    )
    chosen = samples.add_mutually_exclusive_group()
    chosen.add_argument(
        "--worst", dest="order", action="store_const", const="worst", help="lowest reward first"
    )
    chosen.add_argument(
        "--best", dest="order", action="store_const", const="best", help="highest reward first"
    )
    chosen.add_argument(
        "--longest",
        dest="order",
        action="store_const",
        const="longest",
        help="longest response first, in tokens",
    )
    chosen.add_argument(
        "--grep",
        metavar="TEXT",
        help="only samples with this text in prompt or response, ignoring case; without --step, of all "
        "steps, newest first",
    )
    chosen.add_argument(
        "--diff",
        type=int,
        metavar="STEP",
        help="responses to the same prompts at that step and at --step, side by side",
    )
    samples.add_argument(
        "--number", type=int, default=5, metavar="K", help="maximum number of samples (default 5)"
    )


def add_layers(parser: argparse.ArgumentParser) -> None:
    """Add the options ``--with`` and ``--allow-env``, which affect how a configuration is loaded."""
    parser.add_argument(
        "--with",
        dest="layers",
        action="append",
        default=[],
        metavar="FILE",
        help="merge this YAML file, or a shipped one such as base/dtensor, over CONFIG; may be given "
        "several times",
    )
    parser.add_argument(
        "--allow-env",
        action="store_true",
        help="let the configuration take values of environment variables, ${oc.env:NAME}; they are not "
        "written into the files of a run",
    )


def add_convert(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand ``convert``, whose package does not depend on megarl."""
    from converters.command import build_parser as add_arguments

    add_arguments(
        commands.add_parser(
            "convert", help="convert checkpoints between Hugging Face and Megatron-Core, and verify them"
        )
    )


def add_parity(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand ``parity``."""
    from megarl.parity.faults import MUTATIONS

    parity = commands.add_parser(
        "parity",
        help="compare layouts with plain transformers",
        description="Run random tiny models, layouts, batches and losses on the backends, on a CPU, and "
        "compare log-probabilities, losses, "
        "metrics, gradient norms and the weights after two optimizer steps with one process of plain "
        "transformers.",
        epilog="Exit codes: 0 all agree (with --prove: all faults are caught), 1 otherwise, 2 wrong "
        "arguments, 130 interrupted.",
    )
    parity.add_argument("--cases", type=int, default=100, metavar="N", help="random cases (default 100)")
    parity.add_argument(
        "--seed", type=int, default=0, metavar="N", help="seed of the random cases (default 0)"
    )
    parity.add_argument(
        "--backend",
        nargs="+",
        default=[],
        choices=["megatron", "dtensor", "fsdp1"],
        help="only these backends",
    )
    parity.add_argument(
        "--max-world", type=int, default=8, metavar="N", help="maximum number of ranks of a case (default 8)"
    )
    parity.add_argument(
        "--only",
        default="",
        metavar="WORDS",
        help='what every random case has, for example "cp=2 batching=packed"',
    )
    parity.add_argument("--case", metavar="LINE", help="run this one case, as printed by a failure")
    further = "; in this checkout also those of tests/mutations" if MUTATIONS.is_file() else ""
    kinds = "logprobs, loss, metric, grad_norm or weights"
    parity.add_argument(
        "--mutate",
        metavar="NAME",
        help=f"plant a fault in the workers; with --prove also all of a kind: {kinds}{further}",
    )
    parity.add_argument(
        "--prove",
        action="store_true",
        help="plant every fault, one after the other, or those of --mutate; each has to be caught",
    )
    parity.add_argument("--json", type=Path, metavar="FILE", help="write the results to this file")
    parity.add_argument(
        "--job-seconds",
        type=float,
        default=120,
        metavar="N",
        help="how long the workers of a case may take (default 120)",
    )


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse a command line. Configuration overrides may occur anywhere among the options.

    Returns:
        The arguments, with ``overrides`` and ``strangers`` added: unknown options with their values, which
            only commands with a configuration accept.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    parser = build_parser()
    if words and not words[0].startswith("-") and words[0] not in parser.get_default("commands"):
        _refuse_command(parser, words[0])
    # `parse_args` would reject overrides, which may occur anywhere, and unknown options, which get a better
    # message later.
    arguments, rest = parser.parse_known_args(words)
    unknown = [word for word in rest if word.startswith("-")]
    takes_configuration = arguments.command in {"train", "eval"} or (
        arguments.command == "doctor" and arguments.nodes
    )
    if not takes_configuration and rest:
        word, action = (unknown or rest)[0], getattr(arguments, "action", None)
        command = " ".join(filter(None, ("megarl", arguments.command, action)))
        options = _options(arguments.commands[arguments.command])
        near = [] if action else difflib.get_close_matches(word, options, n=1)
        # An action of megarl convert has its own usage.
        getattr(arguments, "refuse", parser.error)(
            f"unrecognized argument: {word}; "
            + (f"did you mean {near[0]}?" if near else f"{command} --help lists what there is")
        )
    arguments.strangers, words = _without_options(words, unknown)
    if unknown:
        strangers = arguments.strangers
        # Parse again without the unknown options, because argparse may have taken the value of one for
        # CONFIG.
        arguments, rest = parser.parse_known_args(words)
        arguments.strangers = strangers
    positional = [*([] if getattr(arguments, "config", None) is None else [arguments.config]), *rest]
    arguments.overrides = positional
    if takes_configuration:
        # argparse takes the first word for CONFIG, but it may be an override.
        arguments.config = next((word for word in positional if not _is_override(word)), None)
        if arguments.config is not None:
            positional.remove(arguments.config)
    _refuse_combinations(parser, arguments)
    return arguments


_GUESSED = {
    "help": "megarl --help",
    "list": "megarl recipes",
    "plan": "megarl train CONFIG --dry-run",
    "quickstart": "bash launch/quickstart.sh",
    "resume": "megarl train CONFIG: the command of a run resumes it",
    "run": "megarl train CONFIG",
    "version": "megarl --version",
}


def _refuse_command(parser: argparse.ArgumentParser, word: str) -> None:
    """Exit with a usage error for a word that is not a command, if it is clear what is meant."""
    from megarl.config.recipes import is_recipe

    near = difflib.get_close_matches(word, parser.get_default("commands"), n=1)
    if _is_algorithm(word):
        parser.error(
            f"{word} is an algorithm, not a command: megarl train RECIPE key=value ...; megarl "
            "recipes lists its recipes"
        )
    meant = (
        f"megarl train {word}"
        if is_recipe(word)
        else _GUESSED.get(word) or (f"megarl {near[0]}" if near else "")
    )
    if meant:
        parser.error(f"there is no command {word}. Fix: write {meant}")


def _refuse_combinations(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """Exit with a usage error if two arguments cannot be combined."""
    if arguments.command == "train" and arguments.data and not arguments.dry_run:
        parser.error("--data goes with --dry-run; a run reads its data anyway")
    if (
        arguments.command == "eval"
        and arguments.checkpoint is not None
        and (arguments.model or arguments.adapter)
    ):
        parser.error(
            "--checkpoint has the complete weights of a run: give it alone, or give --model and --adapter"
        )
    if arguments.command == "samples" and arguments.number < 1:
        parser.error(f"--number {arguments.number} is below 1")
    if arguments.command == "doctor" and arguments.nodes and arguments.transformer_engine:
        parser.error("--transformer-engine checks this machine; with --nodes, CONFIG says what a run needs")
    if arguments.command == "doctor" and arguments.config is not None and not arguments.nodes:
        parser.error("CONFIG goes with --nodes; what a machine has does not depend on it")


def _is_algorithm(word: str) -> bool:
    from megarl.config.algorithms import ALGORITHMS

    return word in ALGORITHMS


def _is_override(word: str) -> bool:
    # A path may contain =, so the name of an existing file is not an override.
    return (word.startswith("~") and "/" not in word) or ("=" in word and not Path(word).is_file())


def _without_options(
    words: Sequence[str], unknown: Collection[str]
) -> tuple[list[tuple[str, object]], list[str]]:
    """Remove unknown options and their values from a command line.

    A word that names a recipe or a YAML file is CONFIG, not the value of an unknown option.

    Returns:
        (removed options with their values, remaining words).
    """
    from megarl.config.recipes import is_recipe

    taken: list[tuple[str, object]] = []
    kept: list[str] = []
    values: list[str] | None = None
    # The additional word "-" ends the values of an option at the end of the command line.
    for word in [*words, "-"]:
        if values is not None and (
            (word.startswith("-") and not word[1:2].isdigit()) or "=" in word or is_recipe(word)
        ):
            taken[-1] = (taken[-1][0], True if not values else values[0] if len(values) == 1 else values)
            values = None
        if word in unknown:
            name, equals, value = word.partition("=")
            taken.append((name, value))
            values = None if equals else []
        elif values is not None:
            values.append(word)
        else:
            kept.append(word)
    return taken, kept[:-1]


def load_and_check(
    path: str | None,
    overrides: Sequence[str],
    layers: Sequence[str] = (),
    allow_env: bool = False,
    strangers: Sequence[tuple[str, object]] = (),
    own_options: Sequence[str] = (),
) -> RunConfig:
    """Return the configuration of a run: loaded, overridden, checked and completed with defaults.

    Args:
        path: file or recipe; None if the command line names none.
        overrides: ``key=value`` words.
        layers: files that are merged over the configuration.
        allow_env: allow the configuration to use environment variables.
        strangers: (option, value) pairs of options that the command does not have.
        own_options: options that the command has.

    Raises:
        ConfigError: something is wrong; it has all faults of the configuration and of the command line.
    """
    from megarl.config.load import followers_of, load_config, with_environment
    from megarl.config.other_trainers import option_faults, override_faults, split_overrides
    from megarl.config.places import require_answers
    from megarl.config.recipes import directory, find, missing_recipe, name_of
    from megarl.config.validate import validate_config

    own, foreign = split_overrides(overrides)
    config: Config = {}
    found: list[Violation] = []
    text = ""
    try:
        if path is None:
            words = [*overrides, *(str(value) for _, value in strangers)]
            found = [missing_recipe(words), *override_faults(own)]
        else:
            require_answers({"CONFIG": path, **{f"--with {layer}": layer for layer in layers}})
            file = find(path)
            if file.parent == directory() / "base":
                raise ConfigError(f"{path} is a part of recipes. Fix: name a recipe, and add --with {path}")
            files = list(map(find, layers))
            config = load_config(file, own, files, allow_env=allow_env)
            # The config.yaml of a run names the recipe from which that run was started; keep that.
            config.setdefault("recipe", name_of(file))
            checked = validate_config(
                with_environment(config), config["recipe"], lambda: followers_of(file, own, files)
            )
    except ConfigError as error:
        found = list(error.violations)
        text = "" if found else str(error)
    found = [*option_faults([*strangers, *foreign], config, own_options), *found]
    if text:
        raise ConfigError(f"{text}\n{ConfigError(found)}" if found else text)
    if found:
        raise ConfigError(found)
    return checked


def _options(parser: argparse.ArgumentParser) -> list[str]:
    return re.findall(r"--[a-z][\w-]*", parser.format_help())


def load_arguments(arguments: argparse.Namespace, more: Sequence[str] = ()) -> RunConfig:
    """Return the configuration of a command line. For unknown options, or without CONFIG, print usage and
    errors, and exit.

    Args:
        arguments: the parsed command line.
        more: further overrides, applied last.

    Raises:
        ConfigError: the configuration is invalid.
    """
    options = _options(arguments.parser)
    try:
        return load_and_check(
            arguments.config,
            [*arguments.overrides, *more],
            arguments.layers,
            arguments.allow_env,
            arguments.strangers,
            options,
        )
    except ConfigError as error:
        if arguments.config is not None and not arguments.strangers:
            raise
        sys.stderr.write(arguments.parser.format_usage())
        sys.exit(report(error))


def list_recipes(as_json: bool) -> int:
    """Print the shipped configurations with their summaries, and return exit code 0."""
    from megarl.config.recipes import PARTS, recipes

    shipped = {part: list(recipes(part)) for part in PARTS}
    if as_json:
        rows = [
            {"name": each.name, "path": str(each.path), "summary": each.summary}
            for part in PARTS
            for each in shipped[part]
        ]
        print(json.dumps(rows, indent=1))
        return 0
    titles = {
        "": "Recipes",
        "quickstart": "Quickstart: a tiny model on a CPU",
        "base": "Parts of recipes, for --with or defaults",
    }
    for part in PARTS:
        print(f"{titles[part]}\n")
        for each in shipped[part]:
            print(f"{each.name}\n    {each.summary}")
        print()
    print(
        "megarl train NAME --dry-run shows what one would do; megarl train NAME key=value changes it; "
        "megarl keys WORD finds keys."
    )
    return 0


def list_keys(words: Sequence[str]) -> int:
    """Print the configuration keys that match all words. Return exit code 0, or 1 if there are none."""
    from megarl.config.reference import search_keys

    found = False
    for paragraph in search_keys(words):
        print(paragraph)
        found = True
    if not found:
        message = f"megarl: no key has {' and '.join(words)} in its name or meaning; megarl keys lists all"
        print(redacted_text(message), file=sys.stderr)
    return 0 if found else 1


def _time(text: str) -> float:
    """Return the value of ``--stop-at`` as Unix seconds."""
    from megarl.run.time_left import read_time

    try:
        return read_time(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def train(arguments: argparse.Namespace) -> int:
    """Execute ``megarl train``: run a configuration, or show the dry-run report."""
    from megarl.observe.progress import ProgressConsole, progress_shown

    with contextlib.ExitStack() as stack:
        if not arguments.dry_run:
            console = stack.enter_context(progress_shown(ProgressConsole()))
            if arguments.config is not None and not arguments.strangers:
                # Print a line before the imports, which take a second.
                console.say(redacted_text(f"megarl {__version__}: {arguments.config}"))
        return _train(arguments)


def _train(arguments: argparse.Namespace) -> int:
    from megarl.config.recipes import misnamed_directory, other_run_of
    from megarl.config.validate import doubt_of_memory, unusual_values
    from megarl.observe.progress import note

    config = load_arguments(arguments)
    for warning in unusual_values(config):
        print(redacted_text(f"megarl: warning: {warning}"), file=sys.stderr)
    misnamed = misnamed_directory(arguments.config, config["run_dir"])
    if misnamed is not None:
        print(
            f"megarl: warning: {misnamed} holds a run, perhaps of this recipe, whose name earlier versions "
            "cut at its last dot: "
            f"run_dir={misnamed} resumes it. This run goes to {config['run_dir']}",
            file=sys.stderr,
        )
    other = other_run_of(arguments.config, config["run_dir"])
    if other is not None and not any(word.lstrip("+").startswith("run_dir=") for word in arguments.overrides):
        print(
            f"megarl: warning: {arguments.config} names run_dir: {config['run_dir']}, where this run goes; "
            f"run_dir={other} resumes the run in {other}",
            file=sys.stderr,
        )
    if arguments.dry_run:
        show(config, arguments.data)
        return 0
    doubt = doubt_of_memory(config)
    if doubt is not None:
        print(f"megarl: warning: {doubt}", file=sys.stderr)
    note(f"run directory {config['run_dir']}")
    # Import this module only now, because it imports everything that training needs.
    from megarl.run.run import run

    return int(run(config, stop_at=arguments.stop_at) or 0)


def evaluate(arguments: argparse.Namespace) -> int:
    """Execute ``megarl eval``: evaluate a model on the validation sets of a configuration."""
    from megarl.config.validation_sets import instead_in_evaluation

    # Quote the paths as JSON, because YAML might read one as a number or a boolean.
    chosen = [] if arguments.model is None else [f"policy.model_name={json.dumps(arguments.model)}"]
    if not any("cluster.memory_check=" in word for word in arguments.overrides):
        # The memory check counts gradients and optimizer state, which an evaluation does not have.
        chosen.append("++cluster.memory_check=warn")
    if arguments.adapter is not None:
        # Drop the configuration's own adapters: only the base weights with this adapter merged in are
        # evaluated.
        chosen += ["policy.peft=null", f"policy.merged_adapter={json.dumps(arguments.adapter)}"]
    for word in arguments.overrides:
        key = word.partition("=")[0].lstrip("+~")
        instead = instead_in_evaluation(key)
        if instead is not None:
            text = f"{key} applies to training steps, and an evaluation does not read it: write {instead}"
            print(f"megarl: warning: {text}", file=sys.stderr)
    config = load_arguments(arguments, chosen)
    _warn_of_another_tokenizer(config, arguments.model)
    from megarl.observe.progress import ProgressConsole, progress_shown
    from megarl.run.evaluate import run

    with progress_shown(ProgressConsole()):
        return run(config, arguments.checkpoint, arguments.json, dry_run=arguments.dry_run)


def _warn_of_another_tokenizer(config: RunConfig, model: str | None) -> None:
    """Warn if ``--model`` is not the model whose tokenizer the configuration names, because the tokenizer
    then stays that of the configuration."""
    name = config["policy"]["tokenizer"]["name"]
    if model is not None and name != model:
        print(
            f"megarl: warning: tokenizer and chat template are those of policy.tokenizer.name = {name}, and "
            f"stop tokens those of the configuration. For the model's own, add policy.tokenizer.name={model} "
            "policy.generation.stop_token_ids=null",
            file=sys.stderr,
        )


def show(config: RunConfig, data: bool) -> None:
    """Print the dry-run report of a checked configuration. All checks run before anything is printed.

    Args:
        config: the configuration.
        data: also read the data, and describe them.
    """

    from megarl.config.model_facts import facts_of_policy, published_config
    from megarl.config.plan import verdict
    from megarl.config.report import output_console, print_report
    from megarl.config.validate import doubt_of_memory
    from megarl.run.model_check import check_models_on_disk
    from megarl.run.preflight import findings, print_findings, require_files_of_models

    check_models_on_disk(config)
    lacking, found = findings(config), []
    if data:
        require_files_of_models(lacking)
        from megarl.run.inputs import describe_inputs

        # Pass a copy, because reading the data fills in keys, and the report shows the configuration without
        # them.
        found = describe_inputs(copy.deepcopy(config))
    console = output_console(highlight=True)
    model_name = config["policy"]["model_name"]
    print_report(config, facts_of_policy(config["policy"]), console)
    if published_config(model_name) is not None:
        console.print(f"{model_name} is not on this disk; its published sizes are used.", markup=False)
    for line in found:
        console.print(redacted_text(line), markup=False, highlight=False)
    print_findings(lacking, console)
    doubt = doubt_of_memory(config) or verdict(config)
    if doubt is not None:
        console.print(doubt, markup=False, highlight=False, soft_wrap=True)


def doctor(arguments: argparse.Namespace) -> int:
    """Execute ``megarl doctor``: check this machine, or with ``--nodes`` a Ray cluster."""
    if not arguments.nodes:
        from megarl.doctor.command import run

        return run(arguments.run_dir, arguments.json, arguments.transformer_engine)
    from megarl.doctor.command import run_on_nodes

    has_configuration = arguments.config is not None or arguments.overrides or arguments.strangers
    config = load_arguments(arguments) if has_configuration else None
    return run_on_nodes(config, arguments.json)


def require_runs(arguments: argparse.Namespace) -> None:
    """Check that the file systems of the run directories on the command line respond.

    Raises:
        ConfigError: one does not respond in time.
    """
    from megarl.config.places import require_answers

    runs = getattr(arguments, "runs", None) or filter(None, [getattr(arguments, "run", None)])
    require_answers({f"RUN {run}": run for run in runs})


def samples(arguments: argparse.Namespace) -> int:
    """Execute ``megarl samples``: print prompts and responses of a run."""
    from megarl.observe.sample_files import TRAIN, VALIDATION
    from megarl.watch.samples import Selection, run

    kind = VALIDATION if arguments.validation else TRAIN
    return run(
        arguments.run,
        Selection(arguments.step, kind, arguments.order, arguments.grep, arguments.diff, arguments.number),
    )


def parity(arguments: argparse.Namespace) -> int:
    """Execute ``megarl parity``: compare backends and layouts with plain transformers."""
    from megarl.parity.command import Options, run

    options = Options(
        cases=arguments.cases,
        seed=arguments.seed,
        backends=arguments.backend,
        max_world=arguments.max_world,
        case=arguments.case,
        mutate=arguments.mutate,
        prove=arguments.prove,
        json=arguments.json,
        only=arguments.only,
        job_seconds=arguments.job_seconds,
    )
    return run(options)


def _megatron_logprobs(family_files: Sequence[Path]) -> AbstractContextManager[Any]:
    """Return the context manager through which ``convert selftest`` computes log-probabilities with
    Megatron-Core."""
    from megarl.parity.converted import megatron_logprobs

    return megatron_logprobs(family_files)


def report(error: MegarlError | ConversionError) -> int:
    """Print an error to standard error, and return the exit code. Errors that the user can fix are printed
    without the traceback of a worker."""
    limit = process_limit(error)
    found_by_worker = isinstance(error.__cause__, ConversionError)
    code = USER_FAULT if found_by_worker or limit is not None else error.exit_code
    text = str(error) if limit is None else f"{str(error).partition(WORKER_TRACE)[0]}\n{limit}"
    # Return the exit code even if standard error is closed.
    with contextlib.suppress(OSError):
        sys.stderr.write(
            redacted_text(f"megarl: {text.partition(WORKER_TRACE)[0] if code == USER_FAULT else text}\n")
        )
    return code


def process_limit(error: BaseException) -> MachineError | None:
    """Return an error that explains the limit on processes or threads, if this limit caused ``error`` here
    or in a worker; otherwise None.

    A restart would hit the same limit, so only the user can fix it.
    """
    text = "".join(traceback.format_exception(error))
    no_process = os.strerror(errno.EAGAIN) in text and any(name in text for name in _FORKING)
    if not no_process and _NO_THREAD not in text:
        return None
    soft = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    value = "unlimited" if soft == resource.RLIM_INFINITY else soft
    bound = "no further process or thread could be started"
    fix = (
        "raise it, or pids.max of the control group (a job's or container's limit), or end other "
        "processes of this user"
    )
    return MachineError([Violation("ulimit -u", value, bound, fix)])


def hide_secrets() -> None:
    """Set up logging and ``sys.excepthook`` so that neither log lines nor tracebacks show secrets of the
    environment or a configuration."""
    # Show INFO messages of our own packages only. Libraries log progress at this level, such as Megatron-Core
    # on import.
    redact_log(env.snapshot())
    for ours in ("megarl", "converters"):
        logging.getLogger(ours).setLevel(logging.INFO)
    sys.excepthook = _show_error


def _show_error(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    # Exit as usual even if standard error is closed.
    with contextlib.suppress(OSError):
        sys.stderr.write(redacted_text("".join(traceback.format_exception(kind, error, trace))))


def main(argv: Sequence[str] | None = None) -> int:
    """Execute a command line, and return its exit code. Unexpected errors end with their traceback."""
    from converters.command import quiet_without_reader

    return quiet_without_reader(lambda: _run(parse(argv)))


def _run(arguments: argparse.Namespace) -> int:
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        # Print a question mark for characters that the locale cannot encode, instead of failing.
        sys.stdout.reconfigure(errors="replace")
    hide_secrets()
    for name in env.forget_unsafe():
        logger.warning("%s is ignored here: with it, the files of a checkpoint could run code", name)
    try:
        if arguments.command == "train":
            return train(arguments)
        if arguments.command == "eval":
            return evaluate(arguments)
        if arguments.command == "recipes":
            return list_recipes(arguments.json)
        if arguments.command == "keys":
            return list_keys(arguments.words)
        if arguments.command == "parity":
            return parity(arguments)
        if arguments.command == "convert":
            from converters.command import run as convert

            return convert(arguments, _megatron_logprobs)
        require_runs(arguments)
        if arguments.command == "status":
            from megarl.watch.status import run as status

            return status(arguments.run, arguments.json, arguments.hashes)
        if arguments.command == "samples":
            return samples(arguments)
        if arguments.command == "doctor":
            return doctor(arguments)
        from megarl.watch.report import run as plot

        return plot(arguments.runs, arguments.out)
    except (MegarlError, ConversionError) as error:
        return report(error)
    except KeyboardInterrupt as error:
        # A conversion attaches notes on the files that it has left behind.
        sys.stderr.write(f"megarl: {'; '.join(['interrupted', *getattr(error, '__notes__', ())])}\n")
        return INTERRUPTED
    except (OSError, RuntimeError) as error:
        limit = process_limit(error)
        if limit is None:
            raise
        return report(limit)


if __name__ == "__main__":
    sys.exit(main())
