"""The command ``megarl convert``, also ``python -m converters``: its sub-commands, and what they say as text and as ``--json``."""

from __future__ import annotations

import argparse
import functools
import json
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from converters.checkpoint.manifest import dtype_name
from converters.checkpoint.quantized import DequantizedSource
from converters.checkpoint.work import BYTES_A_WORKER, resident_memory
from converters.errors import ConversionError
from converters.exporting import ExportPlan
from converters.families import FAMILIES
from converters.foreign.flags import MEGATRON_LM, add_layout_flag, add_opening_flags, opening_options
from converters.importing import ImportPlan
from converters.mapping.logical import HuggingFaceModel, MegatronModel
from converters.mapping.rules import hf_tensors
from converters.verify import Opened

Megatron = Callable[[Sequence[Path]], AbstractContextManager[Any]]
INTERRUPTED = 130
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_EPILOG = "Exit codes: 0 done and equal, 1 differences found, 2 wrong arguments or damaged files, 130 interrupted."


def build_parser(parser: argparse.ArgumentParser | None = None) -> argparse.ArgumentParser:
    """The parser of the command, or its arguments added to ``parser``."""
    parser = parser or argparse.ArgumentParser(prog="python -m converters", description="Convert checkpoints.")
    parser.epilog = _EPILOG
    commands = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    into = commands.add_parser("import", help="Hugging Face safetensors -> torch_dist of Megatron-Core", epilog=_EPILOG)
    into.add_argument("source", help="directory or hub id")
    into.add_argument("--revision", help="branch, tag or commit of a hub repository")
    into.add_argument("--vocab-multiple", type=int, default=1, metavar="N", help="pad the vocabulary with zero rows to a multiple of N")
    add_layout_flag(into)
    out = commands.add_parser("export", help="torch_dist of Megatron-Core -> Hugging Face safetensors", epilog=_EPILOG)
    out.add_argument("source", type=Path, help="checkpoint, or a directory that a trainer keeps it in")
    out.add_argument("--max-shard-size", type=read_size, default=5_000_000_000, metavar="SIZE", help="of a file (default 5e9 bytes)")
    for command in (into, out):
        command.add_argument("target", type=Path, help="directory to make")
        command.add_argument("--workers", type=int, default=2, metavar="N", help="threads (default 2); the bytes do not depend on them")
        command.add_argument("--max-memory", type=read_size, metavar="SIZE", help="resident memory, for example 2GiB")
        command.add_argument("--overwrite", action="store_true", help="replace an existing checkpoint")
        _add_missing(command)
    check = commands.add_parser("verify", help="compare two checkpoints bit for bit, or one with its manifest", epilog=_EPILOG)
    check.add_argument("paths", nargs="+", type=Path, metavar="PATH", help="one or two checkpoints of either format")
    check.add_argument("--logits", action="store_true", help="compare what transformers computes from both, too")
    _add_missing(check)
    differ = commands.add_parser("diff", help="list in what two models differ", epilog=_EPILOG)
    differ.add_argument("paths", nargs=2, type=Path, metavar="PATH")
    _add_missing(differ)
    look = commands.add_parser("inspect", help="say what a checkpoint is", epilog=_EPILOG)
    look.add_argument("paths", nargs=1, type=Path, metavar="PATH")
    dry = commands.add_parser("plan", help="say what a conversion would write, without writing", epilog=_EPILOG)
    dry.add_argument("paths", nargs=1, type=Path, metavar="SOURCE")
    dry.add_argument("--workers", type=int, default=2, metavar="N", help="threads (default 2)")
    _add_missing(dry)
    adapter = commands.add_parser("adapter", help="PEFT adapter <-> adapters in a torch_dist checkpoint", epilog=_EPILOG)
    adapter.add_argument("source", type=Path, help="directory of a PEFT adapter, or checkpoint of LoRA training")
    adapter.add_argument("target", type=Path, help="directory to make")
    adapter.add_argument("--hf-config", type=Path, metavar="DIR", help="with the config.json of the model that the adapter changes")
    adapter.add_argument("--overwrite", action="store_true", help="replace an existing adapter")
    commands.add_parser("families", help="list the model families", epilog=_EPILOG)
    test = commands.add_parser("selftest", help="check a model family with generated tiny models", epilog=_EPILOG)
    test.add_argument("--family", metavar="NAME", help="model_type of the family (default: that of --family-file)")
    test.add_argument("--config", type=Path, metavar="FILE", help="config.json of a tiny model (default: of the family's config class)")
    for name, command in commands.choices.items():
        if name in ("import", "export", "plan"):
            command.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], help="of all tensors (default: each keeps its own)")
        if name in ("import", "plan"):
            command.add_argument("--allow-unsupported", action="store_true", help="import what no model of Megatron-Core computes")
        if name in ("import", "export", "verify", "plan"):
            merged = "merge this adapter" if name != "verify" else "compare the first checkpoint with this adapter merged into it"
            command.add_argument("--lora", type=Path, metavar="DIR", help=f"{merged} (PEFT's directory, or a checkpoint of adapters)")
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
    return parser


def _add_missing(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--allow-missing",
        action="append",
        default=[],
        metavar="PATTERN",
        help="names (with * and ?) on either side that need no counterpart on the other; may be given several times",
    )


def read_size(text: str) -> int:
    """Bytes: ``5000000``, ``5GB``, ``2GiB``, ``512M``.

    Raises:
        argparse.ArgumentTypeError: it is no size.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(i?B)?", text.strip(), flags=re.IGNORECASE)
    if match is None or float(match.group(1)) <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no size; write for example 2GiB or 5GB")
    unit = match.group(2).upper()
    decimal = (match.group(3) or "").upper() == "B"
    return int(float(match.group(1)) * (1000 ** "_KMGT".index(unit or "_") if decimal else _UNITS[unit]))


def run(arguments: argparse.Namespace, megatron: Megatron | None = None) -> int:
    """Run the parsed command. Returns its exit code.

    Args:
        arguments: of ``build_parser``.
        megatron: where there are Megatron-Core workers, what gives a function of theirs to the self-test, from the files of the user's
            families (``ComputeLogprobs``).

    Raises:
        ConversionError: see the exit codes.
    """
    actions: dict[str, Callable[[argparse.Namespace], tuple[int, dict[str, Any], str]]] = {
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
        _load_families(arguments.family_file)
        code, facts, text = actions[arguments.action](arguments)
    except OSError as error:
        raise ConversionError(str(error), "check path, permissions and free space") from error
    sys.stdout.write((json.dumps(facts, indent=1, default=str) if arguments.json else text) + "\n")
    return code


def main(argv: Sequence[str] | None = None) -> int:
    """``python -m converters``. Returns the exit code."""
    arguments = build_parser().parse_args(argv)
    try:
        return run(arguments)
    except ConversionError as error:
        sys.stderr.write(f"converters: {error}\n")
        return error.exit_code
    except KeyboardInterrupt:
        sys.stderr.write("converters: interrupted; a second run goes on where this one ended\n")
        return INTERRUPTED


def _import(arguments: argparse.Namespace) -> tuple[int, dict[str, Any], str]:
    from converters.checkpoint.quantized import open_dequantized
    from converters.foreign.flags import import_for_megatron_lm
    from converters.importing import import_model, plan_import

    plan = plan_import(
        open_dequantized(arguments.source, arguments.revision),
        dtype=_dtype(arguments.dtype),
        vocab_multiple=arguments.vocab_multiple,
        allow_missing=tuple(arguments.allow_missing),
        lora=arguments.lora,
        allow_unsupported=arguments.allow_unsupported,
    )
    return _convert(import_for_megatron_lm if arguments.layout == MEGATRON_LM else import_model, plan, arguments)


def _export(arguments: argparse.Namespace) -> tuple[int, dict[str, Any], str]:
    from converters.exporting import export_model, plan_export
    from converters.opening import open_megatron

    plan = plan_export(
        open_megatron(arguments.source, opening_options(arguments)),
        dtype=_dtype(arguments.dtype),
        max_shard_bytes=arguments.max_shard_size,
        allow_missing=tuple(arguments.allow_missing),
        lora=arguments.lora,
    )
    return _convert(export_model, plan, arguments)


def _convert(convert: Callable[..., Any], plan: Any, arguments: argparse.Namespace) -> tuple[int, dict[str, Any], str]:
    from converters.checkpoint.work import RunOptions, give_memory_back

    give_memory_back()
    begun = time.monotonic()
    progress = None if arguments.json else sys.stderr
    outcome = convert(plan, arguments.target, RunOptions(arguments.workers, arguments.max_memory, arguments.overwrite, progress))
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
    speed = (outcome.size - outcome.resumed) / 1e9 / max(seconds, 1e-9)
    lines = [
        f"{outcome.target}: {plan.architecture.family}, {outcome.tensors} tensors, {_gigabytes(outcome.size)} in {seconds:.1f} s "
        f"({speed:.2f} GB/s), peak memory {outcome.peak_memory / 2**20:.0f} MiB"
    ]
    if outcome.resumed:
        lines.append(f"  {_gigabytes(outcome.resumed)} of it had been written by an earlier run")
    lines += [f"  {key}: {value}" for key, value in outcome.notes.items()]
    return 0, facts, "\n".join(lines)


def _verify(arguments: argparse.Namespace) -> tuple[int, dict[str, Any], str]:
    from converters.verify import verify_paths

    options, excused = opening_options(arguments), tuple(arguments.allow_missing)
    return verify_paths(arguments.paths, options, excused, logits=arguments.logits, lora=arguments.lora)


def _diff(arguments: argparse.Namespace) -> tuple[int, dict[str, Any], str]:
    from converters.verify import diff_paths

    one, other = arguments.paths
    return diff_paths(one, other, opening_options(arguments), tuple(arguments.allow_missing))


def _inspect(arguments: argparse.Namespace) -> tuple[int, dict[str, Any], str]:
    from converters.verify import open_any

    facts = describe(open_any(arguments.paths[0], opening_options(arguments)))
    lines = [f"{key.replace('_', ' ')}: {value}" for key, value in facts.items() if key != "architecture"]
    return 0, facts, "\n".join(lines + ["architecture:"] + [f"  {key}: {value}" for key, value in facts["architecture"].items()])


def _plan(arguments: argparse.Namespace) -> tuple[int, dict[str, Any], str]:
    from converters.checkpoint.quantized import open_dequantized
    from converters.exporting import plan_export
    from converters.importing import plan_import
    from converters.opening import MEGATRON, kind_of, open_megatron

    path = arguments.paths[0]
    options: dict[str, Any] = {"dtype": _dtype(arguments.dtype), "allow_missing": tuple(arguments.allow_missing), "lora": arguments.lora}
    if kind_of(path) == MEGATRON:
        facts = describe_export(plan_export(open_megatron(path, opening_options(arguments)), **options), arguments.workers)
    else:
        plan = plan_import(open_dequantized(path), **options, allow_unsupported=arguments.allow_unsupported)
        facts = describe_import(plan, arguments.workers)
    width = max(len(tensor["key"]) for tensor in facts["tensors"])
    lines = [f"{one['key']:<{width}}  {one['dtype']:>8}  {one['bytes']:>14,}  {one['shape']}" for one in facts["tensors"]]
    lines.append(
        f"{facts['direction']} of {facts['family']}: {len(facts['tensors'])} tensors, {_gigabytes(facts['bytes'])} in "
        f"{len(facts['files'])} files; peak memory at most {facts['peak_memory'] / 2**20:.0f} MiB with {arguments.workers} workers"
    )
    return 0, facts, "\n".join(lines)


def _adapter(arguments: argparse.Namespace) -> tuple[int, dict[str, Any], str]:
    from converters.adapters.adapter_command import convert_adapter

    return convert_adapter(arguments.source, arguments.target, arguments.hf_config, overwrite=arguments.overwrite)


def _families(arguments: argparse.Namespace) -> tuple[int, dict[str, Any], str]:

    families = describe_families()
    return 0, {"families": families}, "\n".join(f"{family['model_type']:<16} {family['class']}" for family in families)


def _load_families(files: Sequence[Path]) -> None:
    if files:
        from converters.family_file import load_family_file

        for file in files:
            load_family_file(file)


def _selftest(arguments: argparse.Namespace, megatron: Megatron | None) -> tuple[int, dict[str, Any], str]:
    from converters.selftest import selftest_of

    return selftest_of(arguments.family, arguments.family_file, arguments.config, megatron)


def _dtype(name: str | None) -> Any:
    from converters.checkpoint.manifest import dtype_called

    return None if name is None else dtype_called(name)


def _gigabytes(size: int) -> str:
    return f"{size / 1e9:.2f} GB" if size >= 10**8 else f"{size / 1e6:.2f} MB"


_EMBEDDING = "embedding.word_embeddings.weight"


def describe(opened: Opened) -> dict[str, Any]:
    """Format, family, sizes, dtypes and layout of a checkpoint."""
    architecture = opened.model.architecture
    dtypes: Counter[str] = Counter()
    elements = size = 0
    missing = []
    for tensor in hf_tensors(architecture):
        if not opened.model.holds(tensor):
            missing.append(tensor.name)
            continue
        dtype, count = opened.model.dtype(tensor), torch.Size(tensor.shape).numel()
        dtypes[dtype_name(dtype)] += 1
        elements += count
        size += count * dtype.itemsize
    facts: dict[str, Any] = {
        "path": str(opened.path),
        "format": opened.kind,
        "family": architecture.family,
        "parameters": elements,
        "bytes": size,
        "dtypes": dict(dtypes),
        "tied_embeddings": architecture.tied_embeddings,
    }
    if missing:
        facts["missing"] = missing
    if isinstance(opened.model, HuggingFaceModel) and isinstance(opened.model.source, DequantizedSource):
        facts |= opened.model.source.notes()
    if isinstance(opened.model, MegatronModel):
        facts["layers"] = "stacked" if opened.model.stacked else "indexed"
        if _EMBEDDING in opened.model.checkpoint:
            facts["padded_vocabulary"] = opened.model.checkpoint.shape(_EMBEDDING)[0]
        facts |= {"optimizer_state": any(key.startswith("optimizer.") for key in opened.model.checkpoint)}
    if opened.manifest is not None:
        facts |= {"converted_from": opened.manifest.source, "manifest_tensors": len(opened.manifest.tensors)}
    return facts | {"architecture": asdict(architecture)}


def describe_import(plan: ImportPlan, workers: int) -> dict[str, Any]:
    """Return what an import would write."""
    tensors = [
        {"key": tensor.key, "shape": list(tensor.shape), "dtype": dtype_name(tensor.dtype), "bytes": _size(tensor.shape, tensor.dtype)}
        for tensor in plan.tensors
    ]
    return _described("import", plan.architecture.family, tensors, [name for name, _ in plan.files], workers)


def describe_export(plan: ExportPlan, workers: int) -> dict[str, Any]:
    """Return what an export would write."""
    tensors = [
        {"key": tensor.name, "shape": list(tensor.shape), "dtype": dtype_name(tensor.dtype), "bytes": tensor.size}
        for tensor in plan.written
    ]
    return _described("export", plan.architecture.family, tensors, list(plan.files), workers)


def _described(direction: str, family: str, tensors: list[dict[str, Any]], files: list[str], workers: int) -> dict[str, Any]:
    return {
        "direction": direction,
        "family": family,
        "tensors": tensors,
        "bytes": sum(tensor["bytes"] for tensor in tensors),
        "files": files,
        "peak_memory": resident_memory() + workers * BYTES_A_WORKER,
    }


def describe_families() -> list[dict[str, Any]]:
    """The families that can be converted."""
    return [
        {"model_type": family.model_type, "class": family.architecture_class, "config_keys": sorted(family.config_keys)}
        for family in FAMILIES.values()
    ]


def _size(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    return torch.Size(shape).numel() * dtype.itemsize
