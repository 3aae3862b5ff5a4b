"""The runner of cases: it runs each case in its own fresh process and turns the measurements into results."""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Iterable, Iterator
from multiprocessing.connection import Connection
from typing import Any

import psutil

from benchmarks import environment
from benchmarks.cases import CASES, Case
from benchmarks.options import AS_EACH_CASE_HAS_IT, Options
from benchmarks.point import Point
from benchmarks.usage import measured_usage
from megarl import env

CASE_SECONDS = 600.0
# Let glibc's allocator keep freed memory, as a GPU's allocator does. Otherwise it learns from what is freed
# whether large blocks get new pages each time: in one process the same code learned one thing, in the next
# another, and was four times slower.
_STEADY_MALLOC = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 40)}
LAST_WORDS_SECONDS = 20.0
OUTPUT_SHOWN = 2000  # characters


def run_case(
    name: str, quick: bool, case: Case | None = None, options: Options = AS_EACH_CASE_HAS_IT
) -> dict[str, Any]:
    """Run a case and return its result, ready for JSON: case, commit, environment, parameters, metrics of
    every point, and whether it succeeded.

    If a case raises, dies or takes longer than ``CASE_SECONDS``, the result has ``success`` false, the reason
    in ``error``, and the points that were finished by then.
    """
    case = case or CASES[name]
    stated = circumstances(quick, options)
    surroundings = stated["environment"]
    with measured_usage() as usage:
        points, error = _collect(case, quick, options)
    surroundings.update(
        load_after=environment.load(), others=None if usage.others is None else round(usage.others, 2)
    )
    if error is None and not points:
        error = "the case measured nothing"
    return {
        "case": name,
        "about": case.about,
        **stated,
        "points": [point.record() for point in points],
        "success": error is None,
        "error": error,
        "seconds": round(usage.wall, 1),
        "cpu_seconds": round(usage.cpu, 1),
    }


def circumstances(quick: bool, options: Options = AS_EACH_CASE_HAS_IT) -> dict[str, Any]:
    """Return the code, the machine and the options of a result, before anything is measured."""
    return {
        "commit": environment.commit(),
        "environment": environment.describe(options.device),
        "quick": quick,
        "options": {option: str(getattr(options, option)) for option in options.chosen},
    }


def run_cases(
    names: Iterable[str], quick: bool, options: Options = AS_EACH_CASE_HAS_IT
) -> Iterator[dict[str, Any]]:
    """Yield the result of each case in the order of ``names``."""
    for name in names:
        yield run_case(name, quick, options=options)


def _collect(case: Case, quick: bool, options: Options) -> tuple[list[Point], str | None]:
    """Return the points of a case and, if it failed, the reason."""
    # Start a new interpreter, so that no case finds what another has imported, allocated or set.
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    points: list[Point] = []
    # What libraries print need not be UTF-8, and a process that is killed may stop within a character.
    with tempfile.NamedTemporaryFile("r", encoding="utf-8", errors="replace") as output:
        process = context.Process(target=_serve, args=(case, quick, options, there, output.name))
        # A process reads these variables when it starts.
        with env.variables(_STEADY_MALLOC):
            process.start()
        # Close this end, because otherwise the death of the process would not end the pipe.
        there.close()
        try:
            error = _receive(here, points)
        except EOFError:
            process.join(timeout=10)
            error = f"the process died with exit code {process.exitcode}"
        finally:
            here.close()
            _end(process)
        return points, error and f"{error}\nLast output:\n{output.read()[-OUTPUT_SHOWN:]}"


def _receive(results: Connection, points: list[Point]) -> str | None:
    """Append points as they arrive. Return the reason if the case failed, otherwise None."""
    # The limit is one for the whole case, not one for each point.
    deadline = time.monotonic() + CASE_SECONDS
    while results.poll(max(0.0, deadline - time.monotonic())):
        message = results.recv()
        if not isinstance(message, Point):
            return None if message is None else str(message)
        points.append(message)
    return f"no end after {CASE_SECONDS:g} s"


def _serve(case: Case, quick: bool, options: Options, results: Connection, output: str) -> None:
    """Run in the case's process: send every point once it is measured, then None, or the reason of a failure.
    Output of libraries goes to a file."""
    # Replace the descriptors, not sys.stdout, because libraries in C write to them as well.
    with open(output, "w", encoding="utf-8") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    # Set these variables before torch is imported, which reads the first one only once.
    os.environ.update(
        {"OMP_NUM_THREADS": "1", "MEGARL_DEVICE": options.device, "TOKENIZERS_PARALLELISM": "false"}
    )
    try:
        measure = getattr(importlib.import_module(case.module), case.function)
        for point in measure(quick, options) if case.takes else measure(quick):
            results.send(point)
        results.send(None)
    except BaseException:
        results.send(traceback.format_exc())


def _end(process: Any) -> None:
    """End the case's process, and if it does not end by itself, also what it started."""
    process.join(timeout=LAST_WORDS_SECONDS)
    if not process.is_alive():
        return
    with contextlib.suppress(psutil.NoSuchProcess):
        # Kill the children before the process itself: once it is gone, they are no longer found below it.
        for child in psutil.Process(process.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
    process.kill()
    process.join()
