"""``python -m benchmarks list`` and ``python -m benchmarks run [CASE ...] [--quick] [--out FILE.json]``."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.cases import CASES
from benchmarks.runner import run_cases


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code: 0, 1 when a case failed, 2 when the command line makes no sense."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="What megarl costs, as ratios measured in one run.")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("list", help="name every case")
    run = commands.add_parser("run", help="run cases and print their ratios")
    run.add_argument("cases", nargs="*", metavar="CASE", help="all of them by default")
    run.add_argument("--quick", action="store_true", help="small sizes and few repeats: to see that it works, not to quote")
    run.add_argument("--out", type=Path, metavar="FILE.json", help="write the results there as well")
    options = parser.parse_args(arguments)
    if options.command == "list":
        for name, case in CASES.items():
            print(f"{name:<16} {case.about}")
        return 0
    unknown = sorted(set(options.cases) - set(CASES))
    if unknown:
        print(f"no such case: {', '.join(unknown)}. Fix: choose from {', '.join(CASES)}", file=sys.stderr)
        return 2
    return _run(options.cases or list(CASES), options.quick, options.out)


def _run(names: Sequence[str], quick: bool, out: Path | None) -> int:
    results = []
    for result in run_cases(names, quick):
        results.append(result)
        _show(result)
        if out is not None:
            _write(results, out)
    return 0 if all(result["success"] for result in results) else 1


def _write(results: list[dict[str, Any]], out: Path) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    staging = out.with_name(f".{out.name}.partial")
    staging.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    staging.replace(out)


def _show(result: dict[str, Any]) -> None:
    print(f"{result['case']}: {result['about']} ({'ok' if result['success'] else 'FAILED'}, {result['seconds']:g} s)")
    for point in result["points"]:
        print("  " + " ".join(f"{name}={value}" for name, value in point["parameters"].items()))
        for name, metric in point["metrics"].items():
            spread = f"({metric['min']:.4g} to {metric['max']:.4g}, {metric['repeats']} repeats)"
            print(f"    {name:<34} {metric['median']:>10.4g}  {spread}  {metric['unit']}")
    if result["error"]:
        print("  " + result["error"].strip().replace("\n", "\n  "))
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
