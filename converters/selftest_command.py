"""The sub-command ``selftest``: which family, which tiny config, and what to say of the findings."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from converters.errors import ConversionError
from converters.families import family_of
from converters.family_file import load_family_file
from converters.selftest import ComputeLogprobs, Finding, read_tiny_config, selftest
from converters.selftest_models import tiny_config

FAILED = 1


def selftest_of(
    name: str | None,
    family_files: Sequence[Path],
    config: Path | None,
    megatron: Callable[[Sequence[Path]], AbstractContextManager[ComputeLogprobs]] | None,
) -> tuple[int, dict[str, Any], str]:
    """Check one family.

    Args:
        name: of the family; None for that of the last file.
        family_files: of the user's families.
        config: of a tiny model; None to make one.
        megatron: what computes with Megatron-Core, from the files of the user's families; None where there is nothing.

    Returns:
        Exit code, facts for programs, text for people.

    Raises:
        ConversionError: no family is named, or no tiny model of it can be made.
    """
    if name is None and not family_files:
        raise ConversionError("selftest needs a family", "pass --family NAME, or --family-file FILE")
    family = family_of(name) if name is not None else load_family_file(family_files[-1])
    tiny = read_tiny_config(config) if config is not None else tiny_config(family)
    with contextlib.ExitStack() as stack:
        _silence_progress_bars(stack)
        compute = stack.enter_context(megatron(family_files)) if megatron is not None else None
        findings = list(selftest(family, tiny, compute))
    failed = [finding for finding in findings if finding.result == "failed"]
    facts = {"family": family.model_type, "passed": not failed, "findings": [asdict(finding) for finding in findings]}
    return (FAILED if failed else 0), facts, "\n".join([*map(str, findings), _summary(family.model_type, findings)])


def _summary(name: str, findings: Sequence[Finding]) -> str:
    counts = [f"{sum(finding.result == result for finding in findings)} {result}" for result in ("passed", "failed", "left out")]
    return f"{name}: {', '.join(counts)}"


def _silence_progress_bars(stack: contextlib.ExitStack) -> None:
    from transformers.utils import logging

    if logging.is_progress_bar_enabled():
        logging.disable_progress_bar()
        stack.callback(logging.enable_progress_bar)
