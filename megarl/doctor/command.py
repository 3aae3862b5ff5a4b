"""Run the checks of ``megarl doctor``, print them, and return an exit code."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path

from rich.table import Table
from rich.text import Text

from megarl.config.report import output_console
from megarl.config.sections import RunConfig
from megarl.doctor.builds import check_builds
from megarl.doctor.check import Check, Verdict
from megarl.doctor.devices import check_devices
from megarl.doctor.network import check_network
from megarl.doctor.nodes import check_nodes
from megarl.doctor.storage import check_storage
from megarl.doctor.versions import check_system, check_versions
from megarl.redaction import redacted_text

_INDENT = 11
_STYLES = {
    Verdict.OK: "green",
    Verdict.ABSENT: "bright_black",
    Verdict.WARNING: "bold yellow",
    Verdict.FAILED: "bold red",
}


def run(run_dir: str | None = None, as_json: bool = False, needs_transformer_engine: bool = False) -> int:
    """Print all checks of this machine. Return 1 if a check failed, else 0.

    Args:
        run_dir: directory of a planned run, whose storage is checked too; None skips that.
        as_json: print JSON instead of text.
        needs_transformer_engine: see ``check_transformer_engine``.
    """
    return show(examine(run_dir, needs_transformer_engine), as_json)


def run_on_nodes(config: RunConfig | None, as_json: bool = False) -> int:
    """Print the checks of the running Ray cluster. Return 1 if a check failed, else 0.

    Args:
        config: configuration whose demands are compared with the cluster; None for none.
        as_json: print JSON instead of text.
    """
    return show(check_nodes(config), as_json, "the cluster")


def show(checks: Iterable[Check], as_json: bool, where: str = "") -> int:
    """Print checks as they complete, and return the exit code.

    Args:
        checks: the checks.
        as_json: print JSON after the last check, instead of text.
        where: name of what was checked; empty for this machine.
    """
    # Errors of other programs may contain URLs with passwords.
    checks = (
        replace(check, found=redacted_text(check.found), fix=redacted_text(check.fix)) for check in checks
    )
    if as_json:
        answers = list(checks)
        plain = [
            {"room": c.room, "name": c.name, "verdict": c.verdict.value, "found": c.found, "fix": c.fix}
            for c in answers
        ]
        sys.stdout.write(json.dumps({"ok": exit_code(answers) == 0, "checks": plain}, indent=2) + "\n")
        return exit_code(answers)
    console = output_console()
    seen: list[Check] = []
    for room, group in groupby(checks, key=lambda check: check.room):
        console.print(Text(room, style="bold"))
        for check in group:
            seen.append(check)
            console.print(row_of(check))
            if check.fix:
                # Do not wrap, so that the command can be copied.
                console.print(Text(f"{'':{_INDENT}}fix: {check.fix}", style="cyan"), soft_wrap=True)
    console.print(summary(seen, where))
    return exit_code(seen)


def examine(run_dir: str | None, needs_transformer_engine: bool = False) -> Iterator[Check]:
    """Run the checks of this machine one by one, and yield each as it completes."""
    yield from check_versions()
    devices = check_devices()
    yield from devices
    yield from check_builds(
        gpus=any(check.name == "NVIDIA driver" for check in devices),
        needs_transformer_engine=needs_transformer_engine,
    )
    yield from check_system()
    usable = [check for check in devices if check.name == "CUDA" and check.verdict is not Verdict.FAILED]
    yield from check_network(_usable_gpus() if usable else 0)
    if run_dir is not None:
        yield from check_storage(Path(run_dir))


def _usable_gpus() -> int:
    import torch

    return torch.cuda.device_count()


def exit_code(checks: Sequence[Check]) -> int:
    """Return 1 if a check failed, else 0."""
    return int(any(check.verdict is Verdict.FAILED for check in checks))


def row_of(check: Check) -> Table:
    """Return a row with verdict, name and finding. On a narrow terminal the finding wraps within its
    column."""
    row = Table.grid(padding=(0, 1))
    row.add_column(width=_INDENT - 1, no_wrap=True)
    row.add_column(width=19, no_wrap=True)
    row.add_column(overflow="fold")
    row.add_row(
        Text(f"  {check.verdict.value}", style=_STYLES[check.verdict]),
        Text(check.name, style="bold"),
        Text(check.found),
    )
    return row


def summary(checks: Sequence[Check], where: str = "") -> Text:
    """Return a one-line summary; ``where`` as in ``show``."""
    place = f"on {where}" if where else "here"
    failed = [check.name for check in checks if check.verdict is Verdict.FAILED]
    warned = [check.name for check in checks if check.verdict is Verdict.WARNING]
    text = Text(
        f"megarl cannot work {place}: {', '.join(failed)}" if failed else f"megarl can work {place}",
        style="bold red" if failed else "bold green",
    )
    return text.append(f"; see the warnings of: {', '.join(warned)}" if warned else "", style="bold yellow")
