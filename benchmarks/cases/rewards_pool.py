"""What the pool of processes gives: long mathematical answers judged one after another by one process, and by a process a core."""

from __future__ import annotations

import os
from collections.abc import Iterator

from benchmarks.point import Metric, Point
from benchmarks.timing import in_turn
from megarl.rollout.reward_pool import RewardPool, score_of
from megarl.rollout.rewards import RewardSpec, Task, get_reward

CHARACTERS = 12_000
LINE = "Then $x_{{{0}}} = \\frac{{{0}}}{{7}} + \\sqrt{{{0}}}$, since {0} is what the step before gave, and we go on from there with care.\n"


def measure(quick: bool) -> Iterator[Point]:
    """Answers of ``CHARACTERS`` each, a tenth of them wrong; with one process of the pool, and with as many as this one may use."""
    answers, repeats = (64, 3) if quick else (512, 5)
    tasks = [_task(number) for number in range(answers)]
    spec = RewardSpec("math", timeout_s=60.0)
    reward = get_reward(spec)
    cores = len(os.sched_getaffinity(0))
    for processes in sorted({1, cores}):
        pool = RewardPool([spec], processes)
        try:

            def in_processes(pool: RewardPool = pool) -> list[float | None]:
                return [score.value for score in pool.score([(0, task) for task in tasks])]

            def by_itself() -> list[float | None]:
                return [score_of(reward, task, spec).value for task in tasks]

            # processes start and import, and both give the same scores
            assert in_processes() == by_itself() == [float(number % 10 != 0) for number in range(answers)]
            seconds = in_turn({"pool": in_processes, "one": by_itself}, repeats=repeats)
        finally:
            pool.close()
        speed = [one / pooled for one, pooled in zip(seconds["one"], seconds["pool"], strict=True)]
        yield Point(
            {"answers": answers, "characters": CHARACTERS, "processes": processes},
            {
                "speed": Metric.of("speed, of one process that judges by itself", speed),
                "share": Metric.of("speed, of as many such processes, each on a core of its own", [each / processes for each in speed]),
                "pool_seconds": Metric.of("s", seconds["pool"]),
                "one_seconds": Metric.of("s of one process", seconds["one"]),
            },
        )


def _task(number: int) -> Task:
    text, step = "", 0
    while len(text) < CHARACTERS - 100:
        step += 1
        text += LINE.format(number + step)
    answer = number if number % 10 else number + 1
    return Task(f"{text}So the answer is $\\boxed{{\\frac{{{2 * answer}}}{{2}}}}$.", str(number))
