"""``python -m tests.faults``: inject faults into whole runs of a configuration, and say whether what is
promised of each is true."""

from __future__ import annotations

import argparse
import itertools
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

from megarl.config.recipes import find
from tests.faults.fault import KINDS, PHASES, Draw, Fault, FaultError, MissedError, draw, parse
from tests.faults.soak import Entry, Journal, counted, left_to_do
from tests.faults.tiny import BACKENDS, subjects_of
from tests.faults.trial import Subject, Trials, can_mount
from tests.system.whole_runs import LONGEST_WAIT_S

_SHOWN = 3000


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code: 0, 1 where something that is promised is not true, 2 where the command line makes no
    sense."""
    options = _parser().parse_intermixed_args(arguments)
    # so that what was started is ended
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        work = options.work.absolute()
        work.mkdir(parents=True, exist_ok=True)
        faults = [parse(text) for text in options.inject]
        if bool(faults) == bool(options.soak):
            raise FaultError("what is to happen? Fix: give --inject once or several times, or --soak N")
        trials = [Trials(subject, work, options.patience) for subject in _subjects(options, work)]
        if options.soak:
            return _soak(options, trials, work)
        return _inject(faults, options.restart == "within", trials)
    except FaultError as error:
        sys.stderr.write(f"{error}\n")
        return 2


def _parser() -> argparse.ArgumentParser:
    kinds = "\n".join(f"  {name:<10} {kind.about}; {', '.join(kind.keys)}" for name, kind in KINDS.items())
    parser = argparse.ArgumentParser(
        prog="python -m tests.faults",
        usage="python -m tests.faults [CONFIG ...] [key=value ...] [--with FILE] (--inject FAULT ... | "
        "--soak N [--seed S]) --work DIR",
        description="Run a configuration undisturbed, once, and then with faults. It has to end with the "
        "same log and the same weights, "
        "bit for bit, with the exit codes and restarts that are promised, and leave no process, port, "
        "shared memory or file behind. For a "
        "configuration that takes minutes, for example by overrides (grpo.max_num_steps=6), and that is "
        "bit-reproducible.",
        epilog=f"Kinds of faults, and what each takes:\n{kinds}\n\nPhases: {', '.join(PHASES)}. Example:\n"
        "  python -m tests.faults my.yaml grpo.max_num_steps=6 --inject kill:rank=1,phase=train,step=3 "
        "--work runs/faults",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "words", nargs="*", metavar="CONFIG", help="as of megarl train; without one, tiny runs of --backends"
    )
    parser.add_argument(
        "--with", dest="layers", action="append", default=[], metavar="FILE", help="as of megarl train"
    )
    parser.add_argument(
        "--backends",
        nargs="+",
        choices=BACKENDS,
        default=list(BACKENDS),
        help="of the tiny runs (default all three)",
    )
    parser.add_argument(
        "--beside",
        action="store_true",
        help="tiny runs of eight steps with an engine beside the training, in both schedules",
    )
    parser.add_argument(
        "--inject",
        action="append",
        default=[],
        metavar="FAULT",
        help="several happen to the same run, by rising step",
    )
    parser.add_argument(
        "--restart",
        choices=("within", "launcher"),
        default="within",
        help="lost workers are built anew within the launch (default) or by it",
    )
    parser.add_argument(
        "--soak",
        type=int,
        metavar="N",
        help="random faults until N have happened, those of earlier starts included",
    )
    parser.add_argument("--seed", type=int, default=0, help="of the soak")
    parser.add_argument(
        "--kinds", nargs="+", choices=KINDS, help="of the soak (default all that this machine allows)"
    )
    parser.add_argument(
        "--until", type=float, metavar="SECONDS", help="begin no other run of the soak after so long"
    )
    parser.add_argument(
        "--work", type=Path, required=True, metavar="DIR", help="of all runs, and of the journal of a soak"
    )
    parser.add_argument(
        "--patience",
        type=float,
        default=LONGEST_WAIT_S,
        metavar="SECONDS",
        help="longest wait for a moment or an end",
    )
    return parser


def _subjects(options: argparse.Namespace, work: Path) -> list[Subject]:
    is_override = {word: "=" in word or word.startswith("~") for word in options.words}
    changes = [word for word in options.words if is_override[word]]
    changes += [word for layer in options.layers for word in ("--with", str(_file(layer)))]
    configs = [word for word in options.words if not is_override[word]]
    if configs:
        return [Subject(Path(name).stem, _file(name), tuple(changes), Path.cwd()) for name in configs]
    return [
        Subject(each.name, each.config, (*each.arguments, *changes))
        for each in subjects_of(options.backends, work / "tiny", options.beside)
    ]


def _file(name: str) -> Path:
    path = Path(find(name)).absolute()
    if not path.is_file():
        raise FaultError(f"{name} is no file and no recipe. Fix: name a configuration")
    return path


def _inject(faults: Sequence[Fault], within: bool, trials: Sequence[Trials]) -> int:
    good = True
    for each in trials:
        number = next(number for number in itertools.count() if not (each.work / f"run-{number}").exists())
        entry = _try(each, Draw(number, 0, tuple(faults), within, 1, False))
        _show(entry, faults)
        good = good and entry.passed
    return 0 if good else 1


def _soak(options: argparse.Namespace, trials: Sequence[Trials], work: Path) -> int:
    kinds = options.kinds or [
        name
        for name, kind in KINDS.items()
        if (name != "disk_full" or can_mount()) and (options.beside or not kind.beside)
    ]
    subjects = [each.subject for each in trials]
    identity = {
        "seed": options.seed,
        "kinds": kinds,
        "subjects": {each.name: each.fingerprint for each in subjects},
    }
    journal = Journal(work / "journal.jsonl", identity)
    begun = time.monotonic()
    wholes = [(whole.ranks, whole.steps) for whole in (each.whole() for each in trials)]
    draws = (draw(options.seed, number, wholes, kinds) for number in itertools.count())
    for drawn in left_to_do(journal, draws, options.soak):
        if options.until is not None and time.monotonic() - begun > options.until:
            break
        entry = _try(trials[drawn.subject], drawn)
        journal.add(entry)
        _show(entry, drawn.faults)
    print(
        f"\n{journal.faults} faults in {len(journal.entries)} runs; in runs that passed, of "
        f"all:\n\n{counted(journal.entries)}"
    )
    return 0 if all(entry.passed for entry in journal.entries) else 1


def _try(trials: Trials, drawn: Draw) -> Entry:
    """One run; its files go where all is well."""
    name = f"run-{drawn.number}"
    for left in trials.work.glob(f"{name}*"):
        # of a soak that was ended in it
        if left.name == name or left.name.startswith((f"{name}.", f"{name}-")):
            shutil.rmtree(left) if left.is_dir() else left.unlink()
    overrides = [
        f"++checkpointing.save_period={drawn.save_period}",
        f"++checkpointing.async_save={str(drawn.async_save).lower()}",
    ]
    happened = drawn.faults
    try:
        told = trials.run(name, drawn.faults, drawn.within, overrides)
        passed, said, seconds = True, "; ".join(told.words), told.seconds
    except MissedError as error:
        happened, passed, said, seconds = (), True, f"counts for nothing: {error}", 0.0
    except Exception as error:
        passed, seconds = False, 0.0
        said = str(error) if isinstance(error, AssertionError) and str(error) else traceback.format_exc()
    if passed:
        for path in trials.work.glob(f"{name}*"):
            if path.name == name or path.name.startswith(f"{name}."):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
    faults, rows = tuple(map(str, happened)), tuple(fault.row for fault in happened)
    way = "within" if drawn.within else "by launcher"
    said = (
        f"restarts {way}, save_period={drawn.save_period}{', async_save' if drawn.async_save else ''}: {said}"
    )
    return Entry(drawn.number, trials.subject.name, faults, rows, passed, said, round(seconds, 1))


def _show(entry: Entry, faults: Sequence[Fault]) -> None:
    print(
        f"{'ok' if entry.passed else 'FAILED':<7}{entry.subject} {entry.number} ({entry.seconds:g} s): "
        f"{entry.said[:_SHOWN]}"
    )
    for fault in faults:
        print(f"       row {fault.row}: {fault.promise} | {fault}")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
