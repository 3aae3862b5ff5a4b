"""What is said of a checkpoint of adapters beside its tensors: the scale of their product, above all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from converters.adapters.linears import PEFT_PREFIX
from converters.architecture import Architecture
from converters.errors import ConversionError
from converters.foreign.run_config import RUN_CONFIG_FILE, find_run_config, read_section
from converters.json_file import read_json_object
from converters.rules import hf_tensors

_KNOWN = ("LoRA", "CanonicalLoRA")


@dataclass(frozen=True, slots=True)
class Said:
    """What is said.

    Attributes:
        origin: the file that says it.
        raw_config: PEFT's config.
        tensor_parallel: over how many ranks the adapters were cut that were saved, as it stands there; 1 if nothing says it.
    """

    origin: Path
    raw_config: Mapping[str, Any]
    tensor_parallel: Any


def said_of(directory: Path, kept: Path | None, rank: int, names: Sequence[str], architecture: Architecture) -> Said:
    """Look for it.

    Args:
        directory: of the checkpoint.
        kept: the config of PEFT that a conversion kept, where one made the checkpoint.
        rank: of every stored adapter.
        names: PEFT's names of their factors.
        architecture: of the base model.

    Raises:
        ConversionError: nothing says the scale, or what says it says another rank or another kind of adapter.
    """
    if kept is not None:
        try:
            return Said(kept, read_json_object(kept), 1)
        except FileNotFoundError as error:
            raise ConversionError(f"{kept} does not exist", "import the adapter again") from error
    path = find_run_config(directory)
    if path is None:
        raise ConversionError(
            f"nothing says the scale (alpha) of the adapters in {directory}", f"put the {RUN_CONFIG_FILE} of Megatron-Bridge beside them"
        )
    section, model = read_section(path, "peft"), read_section(path, "model")
    kind = str(section.get("_target_", "")).rpartition(".")[2]
    if kind not in _KNOWN:
        raise ConversionError(f"{path}: peft = {kind or section}, known are {' and '.join(_KNOWN)}", "let the trainer merge the adapters")
    if section.get("dim") != rank:
        raise ConversionError(f"{path}: dim = {section.get('dim')!r}, the stored adapters have rank {rank}", "use the file of this run")
    return Said(path, _made_config(section, model, names, architecture), model.get("tensor_model_parallel_size") or 1)


def _made_config(section: Mapping[str, Any], model: Mapping[str, Any], names: Sequence[str], architecture: Architecture) -> dict[str, Any]:
    """PEFT's config of adapters that Megatron-Bridge trained."""
    return {
        "base_model_name_or_path": model.get("hf_model_id"),
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "lora_alpha": section.get("alpha"),
        "lora_dropout": section.get("dropout") or 0.0,
        "modules_to_save": None,
        "peft_type": "LORA",
        "r": section["dim"],
        "target_modules": _targets(names, architecture),
        "task_type": "CAUSAL_LM",
        "use_dora": False,
        "use_rslora": False,
    }


def _targets(names: Sequence[str], architecture: Architecture) -> list[str]:
    """Modules as PEFT's config lists them: by the last part of the name where all that end so have an adapter, otherwise by the whole."""
    modules = {name.removeprefix(PEFT_PREFIX).rpartition(".lora_")[0] for name in names}
    others = {tensor.name.removesuffix(".weight") for tensor in hf_tensors(architecture)} - modules
    targets = set()
    for module in modules:
        end = module.rpartition(".")[2]
        targets.add(module if any(other.endswith(f".{end}") for other in others) else end)
    return sorted(targets)
