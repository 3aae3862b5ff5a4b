"""What the pool of processes gives: long mathematical answers judged one after another by one process, and by a process a core.

What the cores can give is measured beside it: as many processes that judge a part each, which they made by themselves and tell nobody of.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection

import psutil

from benchmarks.point import Metric, Point
from benchmarks.timing import Spent, collector_off
from megarl.rollout.reward_pool import RewardPool, score_of
from megarl.rollout.rewards import RewardSpec, Task, get_reward

CHARACTERS = 12_000
LINE = "Then $x_{{{0}}} = \\frac{{{0}}}{{7}} + \\sqrt{{{0}}}$, since {0} is what the step before gave, and we go on from there with care.\n"

Judge = Callable[[Sequence[Task]], list[float | None]]


def measure(quick: bool) -> Iterator[Point]:
    """Answers of ``CHARACTERS`` each, a tenth of them wrong; with one process of the pool, and with as many as this one may use."""
    answers, repeats = (64, 3) if quick else (512, 3)
    spec = RewardSpec("math", timeout_s=60.0)
    by_itself = _judge(spec)
    cores = len(os.sched_getaffinity(0))
    for processes in sorted({1, cores}):
        with contextlib.ExitStack() as stack:
            pool = RewardPool([spec], processes)
            stack.callback(pool.close)
            apart = stack.enter_context(_apart(by_itself, processes))

            def in_processes(tasks: Sequence[Task], pool: RewardPool = pool) -> list[float | None]:
                return [score.value for score in pool.score([(0, task) for task in tasks])]

            pooled, one, limit = _judged_in_turn(in_processes, by_itself, apart, answers, repeats)
        speed = [alone / together for alone, together in zip(one.wall, pooled.wall, strict=True)]
        yield Point(
            {"answers": answers, "characters": CHARACTERS, "processes": processes},
            {
                "speed": Metric.of("speed, of one process that judges by itself", speed),
                "share": Metric.of("speed, of one process times their number", [each / processes for each in speed]),
                "share_of_limit": Metric.of(
                    "speed, of as many processes that judge a part each and tell nobody",
                    [alone / together for alone, together in zip(limit, pooled.wall, strict=True)],
                ),
                "cpu": Metric.ratio("one process that judges by itself, in CPU seconds of driver and processes", pooled.cpu, one.cpu),
                "pool_seconds": Metric.of("s", pooled.wall),
                "one_seconds": Metric.of("s of one process", one.wall),
                "limit_seconds": Metric.of("s of as many processes that tell nobody", limit),
            },
        )


def _judge(spec: RewardSpec) -> Judge:
    reward = get_reward(spec)
    return lambda tasks: [score_of(reward, task, spec).value for task in tasks]


@contextlib.contextmanager
def _apart(judge: Judge, processes: int) -> Iterator[Callable[[range], float]]:
    """A function that has processes of their own judge a part each of the answers of these numbers, and returns the seconds that took."""
    context = multiprocessing.get_context("fork")
    lines: list[Connection] = []
    children = []
    for _ in range(processes):
        ours, theirs = context.Pipe()
        children.append(context.Process(target=_serve, args=(theirs, judge), daemon=True))
        children[-1].start()
        lines.append(ours)

    def together(numbers: range) -> float:
        for place, line in enumerate(lines):
            line.send(numbers[place::processes])
        for line in lines:
            line.recv()
        begun = time.perf_counter()
        for line in lines:
            line.send("go")
        for line in lines:
            line.recv()
        return time.perf_counter() - begun

    try:
        yield together
    finally:
        for line in lines:
            line.send(None)
        for child in children:
            child.join()


def _serve(line: Connection, judge: Judge) -> None:
    """Make the answers of the numbers that come, say so, judge them when told, say so."""
    while (numbers := line.recv()) is not None:
        tasks = [_task(number) for number in numbers]
        line.send("ready")
        line.recv()
        assert judge(tasks) == _expected(numbers)
        line.send("done")


def _judged_in_turn(
    first: Judge, second: Judge, limit: Callable[[range], float], answers: int, repeats: int
) -> tuple[Spent, Spent, list[float]]:
    """What each took, with answers that none has seen before, after a round in which processes start and import."""
    spent, least = (Spent(), Spent()), []
    with collector_off():
        for turn in range(repeats + 1):
            numbers = range(turn * answers, (turn + 1) * answers)
            tasks = [_task(number) for number in numbers]
            for judge, took in zip((first, second), spent, strict=True):
                begun, used = time.perf_counter(), _cpu_seconds()
                assert judge(tasks) == _expected(numbers)
                if turn:
                    took.wall.append(time.perf_counter() - begun)
                    took.cpu.append(_cpu_seconds() - used)
            seconds = limit(numbers)
            if turn:
                least.append(seconds)
    return *spent, least


def _expected(numbers: range) -> list[float | None]:
    return [float(number % 10 != 0) for number in numbers]


def _cpu_seconds() -> float:
    """Of this process and its children."""
    times = [process.cpu_times() for process in (psutil.Process(), *psutil.Process().children())]
    return sum(each.user + each.system for each in times)


def _task(number: int) -> Task:
    text, step = "", 0
    while len(text) < CHARACTERS - 100:
        step += 1
        text += LINE.format(number + step)
    answer = number if number % 10 else number + 1
    return Task(f"{text}So the answer is $\\boxed{{\\frac{{{2 * answer}}}{{2}}}}$.", str(number))
