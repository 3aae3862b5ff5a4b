"""The command line of ``megarl convert`` and ``python -m converters``: sub-commands and their output."""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import re
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, TextIO

from converters.checkpoint.work import Answer
from converters.errors import ConversionError
from converters.foreign.options import MASTER_WEIGHTS, MODEL_WEIGHTS, OpeningOptions

MEGARL, MEGATRON_LM = "megarl", "megatron-lm"
Megatron = Callable[[Sequence[Path]], AbstractContextManager[Any]]
# A shell reports this exit status, 128 + SIGINT, for an interrupted program.
INTERRUPTED = 130
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_NOTES = {"further_flags": "Megatron-LM needs, besides --load and --use-checkpoint-args"}
_READ_MEGATRON = ("export", "verify", "diff", "inspect", "plan", "adapter")
_EPILOG = (
    "Exit codes: 0 done and equal, 1 differences, NaN or infinity found, 2 wrong arguments or damaged "
    "files, 130 interrupted."
)


def build_parser(parser: argparse.ArgumentParser | None = None) -> argparse.ArgumentParser:
    """Return the argument parser: ``parser`` with the arguments added, or a new one."""
    parser = parser or argparse.ArgumentParser(
        prog="python -m converters", description="Convert checkpoints."
    )
    parser.epilog = _EPILOG
    commands = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    add = functools.partial(commands.add_parser, epilog=_EPILOG)
    _add_conversions(add)
    check = add("verify", help="compare two checkpoints bit for bit, or one with its conversion.json")
    check.add_argument(
        "paths", nargs="+", type=Path, metavar="PATH", help="one or two checkpoints of either format"
    )
    check.add_argument(
        "--logits", action="store_true", help="also compare the logits that transformers computes from both"
    )
    _add_missing(check)
    differ = add("diff", help="list the differences between two models")
    differ.add_argument("paths", nargs=2, type=Path, metavar="PATH")
    _add_missing(differ)
    look = add("inspect", help="describe a checkpoint")
    look.add_argument("paths", nargs=1, type=Path, metavar="PATH")
    dry = add("plan", help="show what a conversion would write")
    dry.add_argument("paths", nargs=1, type=Path, metavar="SOURCE")
    dry.add_argument("--workers", type=int, default=2, metavar="N", help="threads (default 2)")
    _add_missing(dry)
    adapter = add("adapter", help="PEFT adapter <-> adapters in a torch_dist checkpoint")
    adapter.add_argument(
        "source", type=Path, help="directory of a PEFT adapter, or checkpoint of LoRA training"
    )
    adapter.add_argument("target", type=Path, help="directory to create")
    adapter.add_argument(
        "--hf-config",
        type=Path,
        metavar="DIR",
        help="directory with the config.json of the base model",
    )
    adapter.add_argument("--overwrite", action="store_true", help="replace an existing adapter")
    add("families", help="list the model families")
    test = add("selftest", help="check a model family with generated tiny models")
    test.add_argument(
        "--family", metavar="NAME", help="model_type of the family (default: that of --family-file)"
    )
    test.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        help="config.json of a tiny model (default: made from the family's config class)",
    )
    for name, command in commands.choices.items():
        _add_shared(name, command)
        # The parser of the whole program reports unknown arguments, but knows only the names of the actions.
        command.set_defaults(refuse=command.error)
    return parser


def _add_conversions(add: Callable[..., argparse.ArgumentParser]) -> None:
    """Add the sub-commands ``import`` and ``export``."""
    into = add(
        "import",
        help="Hugging Face safetensors -> torch_dist of Megatron-Core",
        description="Hugging Face safetensors -> torch_dist of Megatron-Core. One checkpoint serves every "
        "tensor, pipeline and expert parallel size.",
    )
    into.add_argument("source", help="directory or hub id")
    into.add_argument("--revision", help="branch, tag or commit of a hub repository")
    into.add_argument(
        "--vocab-multiple",
        type=int,
        default=1,
        metavar="N",
        help="pad the vocabulary with zero rows to a multiple of N (Megatron-LM's default: 128 times its "
        "tensor parallel size)",
    )
    _add_layout(into)
    out = add("export", help="torch_dist of Megatron-Core -> Hugging Face safetensors")
    out.add_argument(
        "source", type=Path, help="checkpoint, or the directory in which a trainer keeps its checkpoints"
    )
    _add_export(out)
    for command in (into, out):
        command.add_argument("target", type=Path, help="directory to create")
        command.add_argument(
            "--workers",
            type=int,
            default=2,
            metavar="N",
            help="threads (default 2); the bytes do not depend on them",
        )
        command.add_argument(
            "--max-memory", type=read_size, metavar="SIZE", help="resident memory, for example 2GiB"
        )
        command.add_argument("--overwrite", action="store_true", help="replace an existing checkpoint")
        command.add_argument(
            "--part",
            type=read_part,
            metavar="I/N",
            help="do part I of N, on any machine; the last part completes the checkpoint",
        )
        _add_missing(command)


def _add_shared(name: str, command: argparse.ArgumentParser) -> None:
    """Add the arguments that several sub-commands share to the sub-command ``name``."""
    if name in ("import", "export", "plan"):
        command.add_argument(
            "--dtype",
            choices=["float32", "bfloat16", "float16"],
            help="dtype of all tensors (default: each keeps its own)",
        )
    if name in ("import", "plan"):
        command.add_argument(
            "--allow-unsupported",
            action="store_true",
            help="import a model that Megatron-Core cannot compute",
        )
    if name in ("import", "export", "verify", "plan"):
        merged = (
            "merge this adapter"
            if name != "verify"
            else "compare the first checkpoint with this adapter merged into it"
        )
        command.add_argument(
            "--lora",
            type=Path,
            metavar="DIR",
            help=f"{merged} (PEFT's directory, or a checkpoint of adapters)",
        )
    if name not in ("families", "selftest"):
        command.add_argument(
            "--ignore-config-key",
            action="append",
            default=[],
            metavar="NAME",
            help="key of config.json that the model does not depend on; may be given several times",
        )
    command.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    command.add_argument(
        "--family-file",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="Python file that defines a model family (see converters/family_file.py); it is run",
    )
    if name in ("export", "verify", "diff", "inspect", "plan"):
        add_opening_flags(command)
    if name in _READ_MEGATRON:
        command.add_argument(
            "--signing-key",
            type=Path,
            metavar="FILE",
            help="refuse a Megatron checkpoint that is not signed by this key "
            "(checkpointing.signing_key_file of its run)",
        )


def _add_export(command: argparse.ArgumentParser) -> None:
    untouched = "the model that was trained, whose vision tower and prediction layer are exported"
    command.add_argument(
        "--max-shard-size",
        type=read_size,
        default=5_000_000_000,
        metavar="SIZE",
        help="maximum size of a file (default 5e9 bytes)",
    )
    command.add_argument("--untouched-from", type=Path, metavar="DIR", help=untouched)


def _add_missing(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--allow-missing",
        action="append",
        default=[],
        metavar="PATTERN",
        help="names (with * and ?) on either side that need no counterpart on the other; may be given "
        "several times",
    )


def read_size(text: str) -> int:
    """Parse a size such as ``5000000``, ``5GB``, ``2GiB`` or ``512M`` to bytes.

    Raises:
        argparse.ArgumentTypeError: the text is not a size.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(i?B)?", text.strip(), flags=re.IGNORECASE)
    if match is None or float(match.group(1)) <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no size; write for example 2GiB or 5GB")
    unit = match.group(2).upper()
    # ``GB`` is a power of 1000; ``GiB`` and ``G`` are powers of 1024.
    decimal = (match.group(3) or "").upper() == "B"
    return int(float(match.group(1)) * (1000 ** "_KMGT".index(unit or "_") if decimal else _UNITS[unit]))


def read_part(text: str) -> tuple[int, int]:
    """Parse a part of the work: ``2/8`` means the second of eight parts.

    Raises:
        argparse.ArgumentTypeError: the text is not a part.
    """
    match = re.fullmatch(r"(\d+)/(\d+)", text)
    if match is None or not 1 <= int(match.group(1)) <= int(match.group(2)):
        raise argparse.ArgumentTypeError(f"{text!r} is no part; write 1/8 to 8/8 for eight calls")
    return int(match.group(1)), int(match.group(2))


def run(arguments: argparse.Namespace, megatron: Megatron | None = None) -> int:
    """Run a parsed command, and return its exit code.

    Args:
        arguments: result of ``build_parser().parse_args``.
        megatron: for the self-test: context manager that is called with the family files, and provides a
            ``ComputeLogprobs`` function that runs on Megatron-Core workers. None without workers.

    Raises:
        ConversionError: the command failed; its exit code is 2.
    """
    actions: dict[str, Callable[[argparse.Namespace], Answer]] = {
        "import": _import,
        "export": _export,
        "verify": _verify,
        "diff": _diff,
        "inspect": _inspect,
        "plan": _plan,
        "adapter": _adapter,
        "families": _families,
        "selftest": functools.partial(_selftest, megatron=megatron),
    }
    try:
        # Register the families before any checkpoint is opened.
        for file in arguments.family_file:
            from converters.family_file import load_family_file

            load_family_file(file)
        # Verify the signature before reading anything, because the readers trust the contents.
        _require_signed(arguments)
        code, facts, text = actions[arguments.action](arguments)
    except OSError as error:
        raise ConversionError(str(error), "check path, permissions and free space") from error
    sys.stdout.write((json.dumps(facts, indent=1, default=str) if arguments.json else text) + "\n")
    return code


def quiet_without_reader(command: Callable[[], int]) -> int:
    """Run a command and return its exit code, without a traceback if the reader of its output has closed the
    pipe (``| head``).

    If the command had finished, its exit code is kept. If the closed pipe interrupted it, the exit code is
    that of a program killed by SIGPIPE.
    """
    code = 128 + signal.SIGPIPE
    try:
        try:
            code = command()
        # ``--help`` prints and exits. Flush here, where a closed pipe is handled.
        except SystemExit:
            _flush_output()
            raise
        _flush_output()
    except BrokenPipeError:
        if not _is_unread(sys.stdout):
            raise
        # The interpreter flushes standard output at exit, and would report the closed pipe.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return code


def _flush_output() -> None:
    # Standard output is None in a program that was started without one.
    if sys.stdout is not None:
        sys.stdout.flush()


def _is_unread(stream: TextIO) -> bool:
    """Return whether a stream is a pipe whose reader is gone. This distinguishes it from a broken pipe to a
    worker."""
    poll = select.poll()
    poll.register(stream.fileno(), 0)
    # A pipe's writing end reports POLLERR when the reader has closed its end.
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``python -m converters``, and return its exit code."""
    return quiet_without_reader(lambda: _main(argv))


def _main(argv: Sequence[str] | None) -> int:
    parser = build_parser()
    arguments, unknown = parser.parse_known_args(argv)
    if unknown:
        arguments.refuse(f"unrecognized arguments: {' '.join(unknown)}")
    try:
        return run(arguments)
    except ConversionError as error:
        # Messages name the installed program, which need not exist here.
        sys.stderr.write(f"converters: {error}\n".replace("megarl convert", parser.prog))
        return error.exit_code
    except KeyboardInterrupt as error:
        sys.stderr.write(f"converters: {interrupted_text(error)}\n")
        return INTERRUPTED


def interrupted_text(error: KeyboardInterrupt) -> str:
    """Return the message of an interrupted command, with the notes about the work it has left."""
    return "; ".join(["interrupted", *getattr(error, "__notes__", ["nothing was being written"])])


@contextlib.contextmanager
def _interrupted_by_sigterm() -> Iterator[None]:
    """Handle SIGTERM like Ctrl-C inside the block, so that locks are released and unfinished work is
    reported."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    # Python allows signal handlers only in the main thread.
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _import(arguments: argparse.Namespace) -> Answer:
    # Import here, so that ``--help`` and ``families`` start without torch.
    from converters.checkpoint.quantized import open_dequantized
    from converters.foreign.arguments import import_for_megatron_lm
    from converters.importing import import_model, plan_import

    plan = plan_import(
        open_dequantized(arguments.source, arguments.revision),
        dtype=_dtype(arguments.dtype),
        vocab_multiple=arguments.vocab_multiple,
        allow_missing=tuple(arguments.allow_missing),
        lora=arguments.lora,
        allow_unsupported=arguments.allow_unsupported,
        ignore_config_keys=tuple(arguments.ignore_config_key),
    )
    return _convert(
        import_for_megatron_lm if arguments.layout == MEGATRON_LM else import_model, plan, arguments
    )


def _export(arguments: argparse.Namespace) -> Answer:
    from converters.exporting import export_model, plan_export
    from converters.opening import open_megatron

    plan = plan_export(
        open_megatron(arguments.source, opening_options(arguments)),
        dtype=_dtype(arguments.dtype),
        max_shard_bytes=arguments.max_shard_size,
        allow_missing=tuple(arguments.allow_missing),
        lora=arguments.lora,
        untouched_from=arguments.untouched_from,
    )
    return _convert(export_model, plan, arguments)


def _convert(convert: Callable[..., Any], plan: Any, arguments: argparse.Namespace) -> Answer:
    from converters.checkpoint.manifest import NOT_FINITE_NOTE
    from converters.checkpoint.work import RunOptions, give_memory_back

    # Before the first chunk, because glibc raises its mmap threshold when the first large block is freed.
    give_memory_back()
    begun = time.monotonic()
    progress = None if arguments.json else sys.stderr
    part = arguments.part
    with _interrupted_by_sigterm():
        options = RunOptions(arguments.workers, arguments.max_memory, arguments.overwrite, progress, part)
        outcome = convert(plan, arguments.target, options)
    seconds = time.monotonic() - begun
    facts = {
        "target": str(outcome.target),
        "family": plan.architecture.family,
        "tensors": outcome.tensors,
        "bytes": outcome.size,
        "resumed_bytes": outcome.resumed,
        "seconds": round(seconds, 3),
        "workers": outcome.workers,
        "peak_memory": outcome.peak_memory,
        **outcome.notes,
    }
    # Resumed bytes took no time in this run. The speed of small files is that of opening them.
    fresh = (outcome.size - outcome.resumed) / 1e9
    speed = f" ({fresh / seconds:.2f} GB/s)" if fresh >= 0.1 else ""
    stored = "" if outcome.tensors == len(plan.dtypes) else f", stored as {outcome.tensors}"
    # The last of several parts completes all of their work, and has written only its own.
    written = _gigabytes(outcome.size) + ("" if part is None else f" by part {part[0]}/{part[1]}")
    lines = [
        f"{outcome.target}: {plan.architecture.family}, {len(plan.dtypes)} tensors{stored}, {written} in "
        f"{seconds:.1f} s{speed}, peak memory {outcome.peak_memory / 2**20:.0f} MiB"
    ]
    if outcome.waits_for and part is not None:
        facts["waits_for"] = list(outcome.waits_for)
        parts = ", ".join(f"{each}/{part[1]}" for each in outcome.waits_for)
        lines = [
            (
                f"part {part[0]}/{part[1]} of {outcome.target} is done, {_gigabytes(outcome.size)}; it waits "
                f"for {parts}"
            )
        ]
    if outcome.resumed:
        lines.append(f"  {_gigabytes(outcome.resumed)} of it had been written by an earlier run")
    for key, value in outcome.notes.items():
        lines.append(f"  {_NOTES.get(key, key)}: {value}")
    # The checkpoint is complete, but NaN or infinity in weights is usually a fault, which a script should
    # notice.
    return int(NOT_FINITE_NOTE in outcome.notes), facts, "\n".join(lines)


def _verify(arguments: argparse.Namespace) -> Answer:
    from converters.adapters.adapter_command import are_adapters, verify_adapters
    from converters.verify import verify_paths

    options, excused = opening_options(arguments), tuple(arguments.allow_missing)
    if not (arguments.logits or arguments.lora) and are_adapters(arguments.paths):
        return verify_adapters(arguments.paths, options.hf_directory, options.ignored_config_keys)
    return verify_paths(arguments.paths, options, excused, logits=arguments.logits, lora=arguments.lora)


def _diff(arguments: argparse.Namespace) -> Answer:
    from converters.verify import diff_paths

    one, other = arguments.paths
    return diff_paths(one, other, opening_options(arguments), tuple(arguments.allow_missing))


def _inspect(arguments: argparse.Namespace) -> Answer:
    from converters.opening import inspect_path

    return inspect_path(arguments.paths[0], opening_options(arguments))


def _plan(arguments: argparse.Namespace) -> Answer:
    from converters.checkpoint.manifest import dtype_name
    from converters.checkpoint.quantized import open_dequantized
    from converters.checkpoint.work import BYTES_A_WORKER
    from converters.exporting import ExportPlan, plan_export
    from converters.files.process import status_bytes
    from converters.importing import ImportPlan, plan_import
    from converters.opening import MEGATRON, kind_of, open_megatron

    path = arguments.paths[0]
    options: dict[str, Any] = {
        "dtype": _dtype(arguments.dtype),
        "allow_missing": tuple(arguments.allow_missing),
        "lora": arguments.lora,
    }
    plan: ImportPlan | ExportPlan
    if kind_of(path) == MEGATRON:
        plan = plan_export(open_megatron(path, opening_options(arguments)), **options)
    else:
        ignored = tuple(arguments.ignore_config_key)
        plan = plan_import(
            open_dequantized(path),
            **options,
            allow_unsupported=arguments.allow_unsupported,
            ignore_config_keys=ignored,
        )
    stored = plan.tensors if isinstance(plan, ImportPlan) else plan.written
    tensors = [
        {"key": one.key, "shape": list(one.shape), "dtype": dtype_name(one.dtype), "bytes": one.size}
        for one in stored
    ]
    facts: dict[str, Any] = {
        "direction": "import" if isinstance(plan, ImportPlan) else "export",
        "family": plan.architecture.family,
        "tensors": tensors,
        "bytes": sum(one.size for one in stored),
        "files": list(dict(plan.files)),
        "peak_memory": status_bytes("VmRSS") + arguments.workers * BYTES_A_WORKER,
    }
    width = max(len(one.key) for one in stored)
    lines = [f"{'tensor':<{width}}  {'dtype':>8}  {'bytes':>14}  shape"]
    lines += (
        f"{one['key']:<{width}}  {one['dtype']:>8}  {one['bytes']:>14,}  {one['shape']}" for one in tensors
    )
    lines.append(
        f"{facts['direction']} of {facts['family']}: {len(tensors)} tensors, {_gigabytes(facts['bytes'])} in "
        f"{len(facts['files'])} files; peak memory at most {facts['peak_memory'] / 2**20:.0f} MiB with "
        f"{arguments.workers} workers"
    )
    return 0, facts, "\n".join(lines)


def _adapter(arguments: argparse.Namespace) -> Answer:
    from converters.adapters.adapter_command import convert_adapter

    ignored = tuple(arguments.ignore_config_key)
    return convert_adapter(
        arguments.source,
        arguments.target,
        arguments.hf_config,
        overwrite=arguments.overwrite,
        ignored=ignored,
    )


def _families(_: argparse.Namespace) -> Answer:
    from converters.families import FAMILIES

    families = [
        {
            "model_type": family.model_type,
            "class": family.architecture_class,
            "config_keys": sorted(family.config_keys),
        }
        for family in FAMILIES.values()
    ]
    return (
        0,
        {"families": families},
        "\n".join(f"{family['model_type']:<16} {family['class']}" for family in families),
    )


def _require_signed(arguments: argparse.Namespace) -> None:
    """Check the signatures of all Megatron checkpoints among the arguments, if ``--signing-key`` is given."""
    if getattr(arguments, "signing_key", None) is None:
        return
    from converters.files.signature import read_key, require_signed
    from converters.torch_dist.location import find_checkpoint, holds_checkpoint

    named = [
        *getattr(arguments, "paths", ()),
        getattr(arguments, "source", None),
        getattr(arguments, "lora", None),
    ]
    found = [find_checkpoint(path) for path in named if path is not None and holds_checkpoint(path)]
    if not found:
        raise ConversionError(
            "--signing-key: only Megatron checkpoints are signed, and none is read", "leave it out"
        )
    key = read_key(arguments.signing_key)
    for directory in found:
        # Verify the optimizer state, which is most of the bytes, only if it is read.
        require_signed(
            directory, key, whole=getattr(arguments, "source_weights", MODEL_WEIGHTS) == MASTER_WEIGHTS
        )


def _selftest(arguments: argparse.Namespace, megatron: Megatron | None) -> Answer:
    from converters.selftest import selftest_of

    return selftest_of(arguments.family, arguments.family_file, arguments.config, megatron)


def _dtype(name: str | None) -> Any:
    from converters.checkpoint.manifest import dtype_called

    return None if name is None else dtype_called(name)


def _gigabytes(size: int) -> str:
    return f"{size / 1e9:.2f} GB" if size >= 10**8 else f"{size / 1e6:.2f} MB"


def _add_layout(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--layout",
        choices=[MEGARL, MEGATRON_LM],
        default=MEGARL,
        help="megatron-lm: a release/ directory with arguments and tracker file, for --load of Megatron-LM",
    )


def add_opening_flags(command: argparse.ArgumentParser) -> None:
    """Add the options of ``OpeningOptions`` to a sub-command that reads Megatron checkpoints."""
    group = command.add_argument_group("facts that a Megatron checkpoint does not record")
    group.add_argument(
        "--hf-config",
        type=Path,
        metavar="DIR",
        help="directory with config and tokenizer, for a checkpoint without them",
    )
    group.add_argument(
        "--tokenizer",
        type=Path,
        metavar="DIR",
        help="tokenizer for a config made from the trainer's settings",
    )
    group.add_argument(
        "--vocab-size", type=int, metavar="N", help="rows of the embedding without padding, for such a config"
    )
    group.add_argument(
        "--eos-token-id",
        type=read_token_ids,
        metavar="N[,N]",
        help="end-of-text token ids for such a config: numbers, or none",
    )
    group.add_argument(
        "--ignore-setting",
        action="append",
        default=[],
        metavar="NAME",
        help="trainer setting that does not change the model; may be given several times",
    )
    group.add_argument(
        "--rope-scaling-factor",
        type=float,
        metavar="X",
        help="Llama 3 rope scaling factor that the model was trained with; Megatron-LM itself always uses 8",
    )
    group.add_argument(
        "--source-weights",
        choices=[MODEL_WEIGHTS, MASTER_WEIGHTS],
        default=MODEL_WEIGHTS,
        help="master: the float32 weights of the optimizer (default: the model's own)",
    )


def opening_options(arguments: argparse.Namespace) -> OpeningOptions:
    """Return the opening options that were given on the command line."""
    return OpeningOptions(
        hf_directory=arguments.hf_config,
        tokenizer=arguments.tokenizer,
        vocab_size=arguments.vocab_size,
        eos_token_ids=arguments.eos_token_id,
        ignored_settings=tuple(arguments.ignore_setting),
        ignored_config_keys=tuple(arguments.ignore_config_key),
        rope_scaling_factor=arguments.rope_scaling_factor,
        weights=arguments.source_weights,
    )


def read_token_ids(text: str) -> tuple[int, ...]:
    """Parse token ids such as ``2``, ``151643,151645`` or ``none``.

    Raises:
        argparse.ArgumentTypeError: the text is neither token ids nor ``none``.
    """
    if text == "none":
        return ()
    numbers = text.split(",")
    # isdigit alone also accepts digits of other scripts and superscripts.
    if not all(number.isascii() and number.isdigit() for number in numbers):
        raise argparse.ArgumentTypeError(
            f"{text!r} is no token id; write for example 2 or 151643,151645, or none"
        )
    return tuple(map(int, numbers))
