"""The sub-command ``adapter``: adapters by themselves, from one side to the other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from converters.adapters.peft_directory import is_peft_directory
from converters.adapters.to_megatron import plan_adapter, write_megatron_adapter
from converters.adapters.to_peft import open_megatron_adapter, write_peft_adapter
from converters.errors import ConversionError


def convert_adapter(source: Path, target: Path, hf_directory: Path | None, *, overwrite: bool) -> tuple[int, dict[str, Any], str]:
    """Convert an adapter to the form that it does not have.

    Args:
        source: directory of PEFT, or ``torch_dist`` checkpoint of adapters.
        target: directory to make.
        hf_directory: with the ``config.json`` of the base model.
        overwrite: replace an existing target of the same kind.

    Returns:
        Exit code, facts, text.

    Raises:
        ConversionError: it cannot be converted exactly, or the target cannot be written.
    """
    if is_peft_directory(source):
        if hf_directory is None:
            raise ConversionError(f"{source} does not hold the config of the model that it changes", "pass --hf-config DIRECTORY of it")
        plan = plan_adapter(source, hf_directory)
        written = write_megatron_adapter(plan, target, overwrite=overwrite)
        facts = {"target": str(target), "format": "megatron", "family": plan.architecture.family, **written, **plan.notes}
    else:
        adapter = open_megatron_adapter(source, hf_directory)
        written = write_peft_adapter(adapter, target, overwrite=overwrite)
        rank = adapter.shape(next(iter(adapter.keys())))[0]
        facts = {"target": str(target), "format": "peft", "family": adapter.family, **written, "rank": rank}
        if adapter.left_out:
            facts["left_out"] = f"{len(adapter.left_out)} tensors of the base model"
    lines = [f"{target}: {facts['format']} adapter of {facts['family']}, {facts['tensors']} tensors, {facts['bytes'] / 1e6:.2f} MB"]
    told = ("target", "format", "family", "tensors", "bytes")
    return 0, facts, "\n".join([*lines, *(f"  {key}: {value}" for key, value in facts.items() if key not in told)])
