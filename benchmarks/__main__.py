"""``python -m benchmarks``: ``list`` names the cases, ``run`` measures them, ``report`` plots results, and
``compare`` shows two results side by side."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import results_file
from benchmarks.baseline import refusal
from benchmarks.cases import CASES
from benchmarks.compare import check, compare
from benchmarks.marks import marks_of
from benchmarks.options import Options, layout_of, numbers_of
from benchmarks.runner import circumstances, run_cases


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code: 0 for success, 1 if a case failed or a ratio fell, 2 if
    the command line is invalid."""
    options = _parser().parse_args(arguments)
    commands: dict[str, Callable[[argparse.Namespace], int]] = {
        "list": _list,
        "run": _run,
        "report": _report,
        "compare": _compare,
    }
    try:
        return commands[options.command](options)
    except results_file.ResultsError as error:
        print(error, file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description="What megarl costs, as ratios measured in one run."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("list", help="name every case")
    run = commands.add_parser("run", help="run cases and print their ratios")
    run.add_argument("cases", nargs="*", metavar="CASE", help="all of them by default")
    run.add_argument(
        "--quick", action="store_true", help="small sizes and few repeats: to see that it works, not to quote"
    )
    run.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="write the results there as well, a file a case; FILE.json takes all",
    )
    adds = (
        "join this run to those in --out, as a baseline of several runs: all of one commit, machine and "
        "choice of options. "
    )
    adds += "Where --out is absent or an empty directory, this run is the first"
    run.add_argument("--add", action="store_true", help=adds)
    run.add_argument(
        "--check",
        type=Path,
        metavar="BASELINE",
        help="exit with 1 when a ratio fell against these results, three times in turn",
    )
    run.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    run.add_argument(
        "--model", metavar="CONFIG", help="a recipe, or a Hugging Face config.json or its directory"
    )
    run.add_argument(
        "--layout", type=_checked(layout_of), metavar="tp=2,pp=2", help="the one layout to measure"
    )
    run.add_argument("--tokens", type=_checked(numbers_of), metavar="N,N", help="lengths of sequences")
    run.add_argument("--rows", type=_checked(numbers_of), metavar="N,N", help="rows of data")
    report = commands.add_parser("report", help="one page of tables and plots")
    report.add_argument(
        "results", type=Path, metavar="DIR", help="what 'run --out' wrote; the page goes beside it"
    )
    report.add_argument("--out", type=Path, metavar="FILE.html", help="the page (default DIR/report.html)")
    both = commands.add_parser("compare", help="set two results side by side")
    both.add_argument("before", type=Path, metavar="A")
    both.add_argument("after", type=Path, metavar="B")
    return parser


def _checked(read: Callable[[str], Any]) -> Callable[[str], Any]:
    """Wrap ``read`` as an argparse type: its ``ValueError`` becomes the one error whose message argparse
    shows."""

    def checked(text: str) -> Any:
        try:
            return read(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return checked


def _list(_: argparse.Namespace) -> int:
    for name, case in CASES.items():
        print(f"{name:<16} {case.about}")
    return 0


def _run(arguments: argparse.Namespace) -> int:
    options = Options(arguments.device, arguments.model, arguments.layout, arguments.tokens, arguments.rows)
    names = arguments.cases or _cases_that_take(options)
    earlier = results_file.read_earlier(arguments.out) if arguments.add and arguments.out is not None else []
    wrong = _fault(names, options) or _fault_of_adding(arguments, earlier, names, options)
    if wrong:
        print(wrong, file=sys.stderr)
        return 2
    baseline = results_file.read(arguments.check) if arguments.check else None
    if arguments.add:
        print(
            f"--add: {len(earlier)} earlier results in {arguments.out}"
            + ("" if earlier else ", so this run is its first")
        )
    results, written, good = [], [], True
    for result in run_cases(names, arguments.quick, options):
        results.append(result)
        _show(result)
        # The tree may have changed while the cases ran, so check again before the result is added.
        apart = refusal(earlier, result, [result["case"]])
        if apart:
            print(f"{result['case']}: not added to {arguments.out}:\n{apart}", file=sys.stderr)
        elif arguments.out is not None:
            written.append(result)
            results_file.write(written, arguments.out, earlier)
        good = good and result["success"] and not apart
    if baseline is not None:
        held, text = check(
            baseline,
            results,
            narrowed=bool(options.chosen),
            again=lambda bad: _again(bad, arguments.quick, options),
        )
        print(text)
        good = good and held
    return 0 if good else 1


def _fault_of_adding(
    arguments: argparse.Namespace, earlier: Sequence[dict[str, Any]], names: Sequence[str], options: Options
) -> str:
    """Return why ``--add`` cannot be done; empty if it can, or if it was not given."""
    if arguments.add and arguments.out is None:
        return (
            "--add: there is no --out, so nothing to add to. Fix: name the baseline with --out DIR; its "
            "first run makes it"
        )
    # Describe this run only if it is compared, because that calls git and reads versions.
    reasons = refusal(earlier, circumstances(arguments.quick, options), names) if earlier else ""
    if not reasons:
        return ""
    return (
        f"--add: this run cannot join those in {arguments.out}:\n{reasons}\n"
        "Fix: measure the same commit, without changes, with the same options, versions and machine; or "
        "begin another baseline.\n"
        "Results that lie in the work tree change it, except below runs/ and benchmarks/results/"
    )


def _again(names: Sequence[str], quick: bool, options: Options) -> list[dict[str, Any]]:
    print(
        f"ratios of {', '.join(names)} were bad: measured once more, because a disturbance passes and a "
        "change stays"
    )
    return list(run_cases(names, quick, options))


def _cases_that_take(options: Options) -> list[str]:
    """Return the cases that follow the chosen options. If no option was chosen, return all cases that need
    none."""
    chosen = set(options.chosen)
    return [
        name
        for name, case in CASES.items()
        if not case.by_name and set(case.needs) <= chosen <= set(case.takes)
    ]


def _fault(names: Sequence[str], options: Options) -> str:
    """Return what is wrong with the chosen cases and options; empty if nothing is."""
    unknown = sorted(set(names) - set(CASES))
    if unknown:
        return f"no such case: {', '.join(unknown)}. Fix: choose from {', '.join(CASES)}"
    for name in names:
        if missing := set(CASES[name].needs) - set(options.chosen):
            return f"{name} needs --{' and --'.join(sorted(missing))}. Fix: give it; see benchmarks/README.md"
    for option in options.chosen:
        deaf = [name for name in names if option not in CASES[name].takes]
        if deaf or not names:
            able = [name for name, case in CASES.items() if option in case.takes]
            return (
                f"--{option}: {', '.join(deaf) or 'no case'} cannot follow it. Fix: leave it out, or "
                f"choose from {', '.join(able)}"
            )
    return ""


def _report(arguments: argparse.Namespace) -> int:
    from benchmarks.report import page

    # If a case has several runs, show the last one.
    results = list({result["case"]: result for result in results_file.read(arguments.results)}.values())
    beside = arguments.results if arguments.results.is_dir() else arguments.results.parent
    out = arguments.out or beside / "report.html"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(page(results), encoding="utf-8")
    print(out)
    return 0


def _compare(arguments: argparse.Namespace) -> int:
    print(compare(results_file.read(arguments.before), results_file.read(arguments.after)))
    return 0


def _show(result: dict[str, Any]) -> None:
    took = f"{result['seconds']:g} s, {result['cpu_seconds']:g} CPU s"
    print(f"{result['case']}: {result['about']} ({'ok' if result['success'] else 'FAILED'}, {took})")
    for point in result["points"]:
        print("  " + " ".join(f"{name}={value}" for name, value in point["parameters"].items()))
        for name, metric in point["metrics"].items():
            spread = f"({metric['min']:.4g} to {metric['max']:.4g}, {metric['repeats']} repeats)"
            print(f"    {name:<34} {metric['median']:>10.4g}  {spread}  {metric['unit']}")
    for mark in marks_of(result):
        print(f"  not to be quoted: {mark}")
    if result["error"]:
        print("  " + result["error"].strip().replace("\n", "\n  "))
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
