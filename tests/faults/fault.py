"""Faults as a person writes them, ``kill:rank=1,phase=train,step=3``, the row of the fault matrix that each
belongs to, and random ones."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from megarl.errors import MicroBatchMemoryError, NonFiniteError, WorkerLostError
from megarl.run.stopping import STOPPED

DRIVER = "driver"
ANY, INIT = "any", "init"
PHASES = (ANY, INIT, "train", "logprobs", "generate", "save", "refit")
"""``any`` is a random moment of the step, ``init`` the construction of the workers, before the first step of
a launch."""
READ, WRITE = "read", "write"
RAYLET, GCS = "raylet", "gcs"
LASTING = 99
"""Reads that fail so often fail for good."""
BACK = None
"""The launch goes on by itself."""


class FaultError(ValueError):
    """A fault that cannot be read, or makes no sense; the message says what would."""


class MissedError(AssertionError):
    """A moment did not come, or was not seen: nothing is known of what would have followed."""


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of fault.

    Attributes:
        about: in a line.
        keys: that it takes, with what they are when they are not said.
        phases: in which it can be.
        targets: whether it may meet ranks, the driver, or neither.
        alone: it cannot be one of several in a run.
        beside: only runs with engines and reward processes beside the training have whom it meets.
    """

    about: str
    keys: Mapping[str, str]
    phases: tuple[str, ...] = (ANY,)
    targets: tuple[str, ...] = ()
    alone: bool = False
    beside: bool = False


_WHERE = {"phase": ANY, "step": "1", "share": "0.5"}
KINDS: Mapping[str, Kind] = {
    "kill": Kind("SIGKILL to a worker, or to the driver", {"rank": "0", **_WHERE}, PHASES, ("ranks", DRIVER)),
    "hang": Kind("SIGSTOP to a worker", {"rank": "0", **_WHERE}, PHASES[:1] + PHASES[2:], ("ranks",)),
    "slow": Kind(
        "a worker that has a tenth of its time for some seconds",
        {"rank": "0", "seconds": "5", **_WHERE},
        (ANY,),
        ("ranks",),
    ),
    "nan": Kind(
        "the output of a layer becomes NaN on one rank", {"rank": "0", "step": "1"}, (ANY,), ("ranks",)
    ),
    "oom": Kind("a layer has no memory on one rank", {"rank": "0", "step": "1"}, (ANY,), ("ranks",)),
    "disk_full": Kind("the disk of the checkpoints is full during a save", {"step": "1"}, alone=True),
    "eio": Kind(
        "opening a file of a checkpoint fails: on=write on a rank during a save, on=read of the driver at "
        "the next start, COUNT times "
        f"({LASTING}: for good)",
        {"rank": "0", "on": WRITE, "count": "2", "step": "1"},
        (ANY,),
        ("ranks",),
    ),
    "term": Kind("SIGTERM to the whole group of the driver", dict(_WHERE)),
    "gcs": Kind("SIGKILL to the control process of Ray", dict(_WHERE)),
    "node": Kind("SIGKILL to the raylet: the node is lost", dict(_WHERE)),
    "stop": Kind("SIGSTOP to a process of Ray: of=raylet or of=gcs", {"of": "raylet", **_WHERE}),
    "stuck": Kind(
        "a layer waits for ever on one rank, in a loop of Python",
        {"rank": "0", "step": "1"},
        (ANY,),
        ("ranks",),
    ),
    "engine": Kind("SIGKILL to a worker that only generates", dict(_WHERE), beside=True),
    "rewards": Kind("SIGKILL to a process that computes rewards", dict(_WHERE), beside=True),
}
STANDS_STILL = ("hang", "stuck")
"""Kinds after which a rank does nothing any more, and is found by that."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault.

    Attributes:
        kind: of ``KINDS``.
        step: in which it happens; one later where the run was faster.
        phase: of ``PHASES``.
        rank: of the policy's workers; None for the driver, or where it has none.
        share: of the step after which it happens, for ``any``.
        seconds: that it lasts, for ``slow``.
        on, count: of ``eio``.
        of: of ``stop``.
    """

    kind: str
    step: int
    phase: str = ANY
    rank: int | None = None
    share: float = 0.0
    seconds: float = 5.0
    on: str = WRITE
    count: int = 2
    of: str = RAYLET

    def __str__(self) -> str:
        """As it is written on the command line, with all that it takes."""
        said: dict[str, str] = {
            "rank": DRIVER if self.rank is None else str(self.rank),
            "phase": self.phase,
            "step": str(self.step),
            "share": f"{self.share:g}",
            "seconds": f"{self.seconds:g}",
            "on": self.on,
            "count": str(self.count),
            "of": self.of,
        }
        return f"{self.kind}:" + ",".join(
            f"{key}={said[key]}" for key in KINDS[self.kind].keys if key != "share" or self.phase == ANY
        )

    def later(self) -> Fault:
        """The same in the next step."""
        return replace(self, step=self.step + 1)

    def exit_code(self, within: bool) -> int | None:
        """What the launch ends with; ``BACK`` where it goes on.

        Args:
            within: whether it may build lost workers anew.
        """
        if self.rank is None and self.kind == "kill":
            return SIGKILLED
        if self.kind in ("kill", "engine", *STANDS_STILL):
            return BACK if within else WorkerLostError.exit_code
        if self.kind == "eio" and self.on == READ:
            # the driver is killed first, so that another start reads
            return SIGKILLED
        return _CODES.get(self.kind, BACK)

    @property
    def row(self) -> str:
        """Number of the row in the fault matrix."""
        if self.kind == "kill":
            return "2" if self.rank is None else "3" if self.phase == "save" else "1"
        return _ROWS[f"{self.kind} {self.on}" if self.kind == "eio" else self.kind]

    @property
    def promise(self) -> str:
        """What has to be true, besides that the run ends like an undisturbed one and leaves nothing
        behind."""
        return _PROMISES[self.row if self.kind != "slow" else "19, slow"]


SIGKILLED = -9
_ROWS = {
    "engine": "1",
    "rewards": "1, rewards",
    "hang": "19",
    "slow": "19",
    "stuck": "19",
    "nan": "11",
    "oom": "18",
    "disk_full": "5",
    "eio write": "5",
    "eio read": "6",
    "term": "27",
    "gcs": "2, Ray",
    "node": "1, node",
    "stop": "2, stopped",
}
_PROMISES = {
    "1": "a killed worker costs a restart, within the launch or by exit code 4",
    "1, rewards": "a killed process of rewards costs time alone: another one takes its task",
    "1, node": "a lost node ends the launch with exit code 4, and the next one goes on",
    "2": "a killed driver leaves nothing behind, and the next launch goes on",
    "2, Ray": "a lost Ray ends the launch with exit code 4 and the reason",
    "2, stopped": (
        "a stopped process of Ray ends the launch within deadlines.least_s with exit code 4 and "
        "the reason, or the run is over"
    ),
    "3": "a kill during a save leaves whole checkpoints only",
    "5": "a save that fails is warned of, what there is of it removed, and the run goes on",
    "6": (
        "a read that fails for a moment is tried again; storage that stays away ends the start, and no "
        "older checkpoint is taken"
    ),
    "11": "what is not finite on one rank ends the run on all, and changes nothing",
    "18": "out of memory on one rank ends the run with the sizes, and changes nothing",
    "19": "a rank that stands still is found, named and replaced",
    "19, slow": "a slow rank costs time alone",
    "27": "SIGTERM saves and exits with 75, and the next launch goes on",
}
_CODES = {
    "gcs": WorkerLostError.exit_code,
    "node": WorkerLostError.exit_code,
    "stop": WorkerLostError.exit_code,
    "term": STOPPED,
    "nan": NonFiniteError.exit_code,
    "oom": MicroBatchMemoryError.exit_code,
}


def parse(text: str) -> Fault:
    """A fault from ``KIND:key=value,...``.

    Raises:
        FaultError: it makes no sense.
    """
    name, _, rest = text.partition(":")
    kind = KINDS.get(name)
    if kind is None:
        raise FaultError(f"{text!r}: there is no kind {name!r}. Fix: choose from {', '.join(KINDS)}")
    given: dict[str, str] = {}
    for part in filter(None, rest.split(",")):
        key, equals, value = part.partition("=")
        if not equals or key not in kind.keys or key in given:
            raise FaultError(
                f"{text!r}: {part!r}. Fix: write key=value, each once, of {', '.join(kind.keys)}"
            )
        given[key] = value
    said = {**kind.keys, **given}
    try:
        fault = Fault(
            name,
            step=int(said["step"]),
            phase=said.get("phase", ANY),
            rank=_rank(said, kind),
            share=float(said.get("share", "0")),
            seconds=float(said.get("seconds", "5")),
            on=said.get("on", WRITE),
            count=int(said.get("count", "2")),
            of=said.get("of", RAYLET),
        )
    except ValueError as error:
        raise FaultError(
            f"{text!r}: {error}. Fix: numbers for rank, step, share, seconds and count"
        ) from error
    bounds = {
        f"step={fault.step}: at least 1": fault.step >= 1,
        f"rank={fault.rank}: at least 0": fault.rank is None or fault.rank >= 0,
        f"share={fault.share:g}: at least 0 and less than 1": 0 <= fault.share < 1,
        f"seconds={fault.seconds:g}: more than 0": fault.seconds > 0,
        f"count={fault.count}: 1 to {LASTING}": 1 <= fault.count <= LASTING,
        f"on={fault.on}: {READ} or {WRITE}": fault.on in (READ, WRITE),
        f"of={fault.of}: {RAYLET} or {GCS}": fault.of in (RAYLET, GCS),
        f"phase={fault.phase}: one of {', '.join(kind.phases)}": fault.phase in kind.phases,
    }
    broken = [bound for bound, holds in bounds.items() if not holds]
    if broken:
        raise FaultError(f"{text!r}: {'; '.join(broken)}")
    return fault


def _rank(said: Mapping[str, str], kind: Kind) -> int | None:
    rank = said.get("rank")
    if rank is None:
        return None
    if rank == DRIVER:
        if DRIVER not in kind.targets:
            raise ValueError("rank=driver: the driver cannot be met by it")
        return None
    return int(rank)


@dataclass(frozen=True, slots=True)
class Draw:
    """What happens to one run of a soak.

    Attributes:
        number: of it, from 0.
        subject: index of the configuration.
        faults: by rising step.
        within: the launch may build lost workers anew.
        save_period, async_save: of its checkpoints; no loss or weight depends on them.
    """

    number: int
    subject: int
    faults: tuple[Fault, ...]
    within: bool
    save_period: int
    async_save: bool


_OFTEN = {kind: 1 for kind in KINDS} | {
    "kill": 10,
    "hang": 3,
    "eio": 3,
    "term": 2,
    "stop": 2,
    "engine": 4,
    "rewards": 2,
}
_LONG = 8
"""Steps of a run that takes more faults: the undisturbed part of each run is what costs time."""


def draw(
    seed: int, number: int, subjects: Sequence[tuple[int, int]], kinds: Sequence[str] = tuple(KINDS)
) -> Draw:
    """One to three faults for run ``number`` of a soak, four to six for a long one; the same ones at every
    start of it.

    Args:
        seed: of the soak.
        number: of the run; the configurations take turns.
        subjects: (ranks, steps) of each configuration.
        kinds: to draw from.
    """
    rng = random.Random(f"faults {seed} {number}")
    subject = number % len(subjects)
    ranks, steps = subjects[subject]
    most = rng.choice((4, 5, 6) if steps >= _LONG else (1, 2, 2, 3))
    chosen = rng.choices(list(kinds), [_OFTEN[kind] for kind in kinds], k=min(most, steps))
    alone = next((kind for kind in chosen if KINDS[kind].alone), None)
    names = [alone] if alone else chosen
    at = sorted(rng.sample(range(1, steps + 1), len(names)))
    # workers that train do not generate where others do
    never = ("refit", "generate") if any(KINDS[kind].beside for kind in kinds) else ("refit",)
    faults = [_drawn(rng, kind, step, ranks, steps, never) for kind, step in zip(names, at, strict=True)]
    faults = sorted(_with_a_save_behind(faults, steps), key=lambda fault: fault.step)
    within, save_period, async_save = rng.random() < 0.6, rng.choice((1, 1, 2)), rng.random() < 0.3
    if any(_fails_to_save(fault.kind, fault.on) for fault in faults):
        # the save that fails follows its step at once
        save_period = 1
    # and there is a checkpoint to read where another one is written
    async_save = async_save and not any(
        fault.kind == "eio" or _fails_to_save(fault.kind, fault.on) for fault in faults
    )
    return Draw(number, subject, tuple(faults), within, save_period, async_save)


def _with_a_save_behind(faults: Sequence[Fault], steps: int) -> list[Fault]:
    """Let each save that fails be that of a step of its own, and another one follow it, or the run ends;
    without room, it is a read."""
    taken = {fault.step for fault in faults if not _fails_to_save(fault.kind, fault.on)}
    moved = []
    for fault in faults:
        if _fails_to_save(fault.kind, fault.on):
            free = [step for step in range(steps - 1, 0, -1) if step not in taken]
            if fault.step not in free and free:
                fault = replace(fault, step=free[0])
            elif not free and fault.kind == "eio":
                fault = replace(fault, on=READ, rank=0, step=steps)
            taken.add(fault.step)
        moved.append(fault)
    return moved


def _fails_to_save(kind: str, on: str) -> bool:
    return kind == "disk_full" or (kind == "eio" and on == WRITE)


def _drawn(rng: random.Random, kind: str, step: int, ranks: int, steps: int, never: Sequence[str]) -> Fault:
    of_driver = DRIVER in KINDS[kind].targets and rng.random() < 0.4
    rank = None if of_driver or not KINDS[kind].targets else rng.randrange(ranks)
    phases = [phase for phase in KINDS[kind].phases if phase not in never and (phase != INIT or step == 1)]
    # half of them at some moment, and the others in the phases
    phase = ANY if rng.random() < 0.5 else rng.choice(phases)
    on, count = rng.choice((READ, WRITE)), rng.choice((1, 2, 3, LASTING))
    # in the last step a little earlier, so that it is not over
    share = round(rng.random() * (0.6 if step == steps else 1.0), 3) if "share" in KINDS[kind].keys else 0.0
    if kind == "eio" and on == READ:
        # there has to be a checkpoint to read
        step = max(step, min(3, steps))
        rank = 0
    seconds = round(rng.uniform(2, 8), 1)
    return Fault(kind, step, phase, rank, share, seconds, on, count, rng.choice((RAYLET, GCS)))
