"""What the pool of processes gives: long mathematical answers judged one after another by one process, and by a process a core."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence

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
    answers, repeats = (64, 3) if quick else (512, 5)
    spec = RewardSpec("math", timeout_s=60.0)
    reward = get_reward(spec)

    def by_itself(tasks: Sequence[Task]) -> list[float | None]:
        return [score_of(reward, task, spec).value for task in tasks]

    cores = len(os.sched_getaffinity(0))
    for processes in sorted({1, cores}):
        pool = RewardPool([spec], processes)

        def in_processes(tasks: Sequence[Task], pool: RewardPool = pool) -> list[float | None]:
            return [score.value for score in pool.score([(0, task) for task in tasks])]

        try:
            pooled, one = _judged_in_turn(in_processes, by_itself, answers, repeats)
        finally:
            pool.close()
        speed = [alone / together for alone, together in zip(one.wall, pooled.wall, strict=True)]
        yield Point(
            {"answers": answers, "characters": CHARACTERS, "processes": processes},
            {
                "speed": Metric.of("speed, of one process that judges by itself", speed),
                "share": Metric.of("speed, of as many such processes, each on a core of its own", [each / processes for each in speed]),
                "cpu": Metric.ratio("one process that judges by itself, in CPU seconds of driver and processes", pooled.cpu, one.cpu),
                "pool_seconds": Metric.of("s", pooled.wall),
                "one_seconds": Metric.of("s of one process", one.wall),
            },
        )


def _judged_in_turn(first: Judge, second: Judge, answers: int, repeats: int) -> tuple[Spent, Spent]:
    """What both took, with answers that neither has seen before, after a round in which processes start and import."""
    spent = Spent(), Spent()
    with collector_off():
        for turn in range(repeats + 1):
            numbers = range(turn * answers, (turn + 1) * answers)
            tasks = [_task(number) for number in numbers]
            for judge, took in zip((first, second), spent, strict=True):
                begun, used = time.perf_counter(), _cpu_seconds()
                assert judge(tasks) == [float(number % 10 != 0) for number in numbers]
                if turn:
                    took.wall.append(time.perf_counter() - begun)
                    took.cpu.append(_cpu_seconds() - used)
    return spent


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
