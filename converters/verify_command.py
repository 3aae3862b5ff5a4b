"""What ``verify`` and ``diff`` say: exit code, facts for ``--json``, text."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from converters.compare import Difference
from converters.errors import ConversionError
from converters.foreign.options import OpeningOptions
from converters.lora_model import merge_opened
from converters.rules import hf_tensors
from converters.verify import differences, logits_difference, open_any, scope, tensor_count, verify

DIFFERENT = 1


def verify_paths(
    paths: Sequence[Path], options: OpeningOptions, excused: Sequence[str], *, logits: bool, lora: Path | None = None
) -> tuple[int, dict[str, Any], str]:
    """Verify one checkpoint, or two against each other.

    Args:
        paths: one or two.
        options: what a Megatron checkpoint does not say itself.
        excused: patterns of names that need no counterpart.
        logits: compare what transformers computes from both, too.
        lora: directory of a PEFT adapter that is merged into the first checkpoint before they are compared.

    Raises:
        ConversionError: it cannot be done, or a file is damaged.
    """
    if len(paths) > 2:
        raise ConversionError(f"verify takes one or two checkpoints, not {len(paths)}", "leave the others out")
    if logits and len(paths) != 2:
        raise ConversionError("--logits compares two checkpoints, and one was given", "give the second, or leave --logits out")
    opened = [open_any(path, options) for path in paths]
    if lora is not None:
        if logits or len(opened) != 2:
            raise ConversionError("--lora compares the values of two checkpoints", "give two checkpoints, and leave --logits out")
        opened[0] = merge_opened(opened[0], lora, opened[1])
    one, other = opened[0], opened[1] if len(opened) == 2 else None
    found = verify(one, other, excused)
    checked, unchecked = scope(one, other, found, excused)
    facts: dict[str, Any] = {
        "equal": not found,
        "values_checked": not any(each.kind == "keys" for each in found) and (other is not None or one.manifest is not None),
        "tensors": tensor_count(one) if not any(each.kind == "keys" for each in found) else None,
        "checked": checked,
        "not_checked": unchecked,
        "differences": [_facts(each) for each in found],
    }
    lines = (
        [f"{len(found)} difference{'' if len(found) == 1 else 's'}", *(f"  {each}" for each in found)]
        if found
        else [f"{facts['tensors']} tensors: {_said(opened)}"]
    )
    if logits and any(each.kind in ("keys", "missing", "shape") for each in found):
        unchecked.append("logits: the models are too different")
    elif logits and any(len(each.recorded.tensors) < len(hf_tensors(each.model.architecture)) for each in opened):
        unchecked.append("logits: a model without some of its tensors has none")
    elif logits and other is not None:
        facts["logits_difference"] = logits_difference(one, other)
        lines.append(f"largest difference of logits: {facts['logits_difference']:.3g}")
    lines += [*(f"  checked: {each}" for each in checked), *(f"  not checked: {each}" for each in unchecked)]
    return (DIFFERENT if found else 0), facts, "\n".join(lines)


def diff_paths(first: Path, second: Path, options: OpeningOptions, excused: Sequence[str]) -> tuple[int, dict[str, Any], str]:
    """List in what two models differ. Arguments and errors as of :func:`verify_paths`."""
    one, other = open_any(first, options), open_any(second, options)
    found = list(differences(one, other, excused))
    facts = {"equal": not found, "differences": [_facts(each) for each in found]}
    return (DIFFERENT if found else 0), facts, "\n".join(map(str, found)) if found else "no difference"


def _said(opened: Sequence[Any]) -> str:
    if len(opened) == 2:
        return "equal bit for bit"
    if opened[0].manifest is not None:
        return "as its manifest and its config say"
    return "as its config says; it has no manifest to compare its values with"


def _facts(difference: Difference) -> dict[str, str]:
    return {"kind": difference.kind, "name": difference.name, "text": difference.text}
