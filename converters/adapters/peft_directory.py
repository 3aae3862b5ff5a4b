"""Read a PEFT adapter: ``adapter_config.json`` and ``adapter_model.safetensors``."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from converters.adapters.lora_config import LoraConfig, read_lora_config
from converters.adapters.megatron_adapter import PEFT_PREFIX
from converters.checkpoint.safetensors_file import SafetensorsFile
from converters.checkpoint.source import ADAPTER_CONFIG
from converters.errors import ConversionError
from converters.families.base import NESTED_PREFIX
from converters.families.vision import HF_PREFIX
from converters.files.reading import read_json_object

_TEXT_PREFIX = "model."
WEIGHTS_FILE = "adapter_model.safetensors"


class PeftDirectory(SafetensorsFile):
    """An adapter directory in PEFT's format, as an ``AdapterSource``.

    Args:
        directory: the directory.

    Raises:
        ConversionError: there is no adapter, or it is damaged or not plain LoRA.
    """

    def __init__(self, directory: Path) -> None:
        super().__init__(_weights_of(directory))
        path = directory / ADAPTER_CONFIG
        self.raw_config = read_json_object(path, (f"{path} does not exist", "save the adapter again"))
        self.config: LoraConfig = read_lora_config(path, self.raw_config)

    def name_as(self, names: Iterable[str]) -> None:
        """Rename the adapter's tensors to the model's names. An adapter has the names of the class with which
        it was trained: ``AutoModelForCausalLM`` names the text model ``model.``, while published
        vision-language models name it ``model.language_model.``."""
        is_nested = any(name.startswith(NESTED_PREFIX) for name in names)
        theirs, ours = (_TEXT_PREFIX, NESTED_PREFIX) if is_nested else (NESTED_PREFIX, _TEXT_PREFIX)

        def renamed(name: str) -> str:
            # The vision tower has the same names in both classes. A nested name also begins like a plain one,
            # so it must not be renamed again.
            if not name.startswith(theirs) or (is_nested and name.startswith((HF_PREFIX, ours))):
                return name
            return ours + name.removeprefix(theirs)

        entries = {}
        for name, entry in self._entries.items():
            own = name.removeprefix(PEFT_PREFIX)
            entries[name if own == name else PEFT_PREFIX + renamed(own)] = entry
        if entries.keys() == self._entries.keys():
            return
        self._entries, listed = entries, self.config
        self.config = replace(
            listed,
            targets=frozenset(map(renamed, listed.targets)),
            target_parameters=frozenset(map(renamed, listed.target_parameters)),
            saved_modules=frozenset(map(renamed, listed.saved_modules)),
            token_indices={renamed(name): rows for name, rows in listed.token_indices.items()},
            # Rank and alpha patterns are regular expressions for the names used in training, so they cannot
            # be renamed.
            beginnings=(ours, theirs),
        )

    def files(self) -> list[Path]:
        """See ``AdapterSource``."""
        return [self.path.with_name(ADAPTER_CONFIG), self.path]


def is_peft_directory(directory: Path) -> bool:
    """Return whether a directory contains at least one file of a PEFT adapter."""
    return directory.is_dir() and any(
        map(Path.is_file, (directory / ADAPTER_CONFIG, *directory.glob("adapter_model.*")))
    )


def _weights_of(directory: Path) -> Path:
    if not directory.is_dir():
        raise ConversionError(
            f"{directory} is not a directory", f"give the directory of a PEFT adapter, with {ADAPTER_CONFIG}"
        )
    if not (directory / WEIGHTS_FILE).is_file():
        # Trainers save the adapters of single steps in subdirectories; suggest these.
        places = (*sorted(directory.glob("adapter_model*")), *sorted(directory.glob(f"*/{WEIGHTS_FILE}")))
        only = f", only {places[0].relative_to(directory)}" if places else ""
        raise ConversionError(
            f"{directory} has no {WEIGHTS_FILE}{only}",
            (
                "give the directory that has it, or save the adapter with save_pretrained of a recent peft; "
                "only safetensors are read, since other formats may run code"
            ),
        )
    return directory / WEIGHTS_FILE
