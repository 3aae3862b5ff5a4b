"""One run of a configuration with faults: it has to end like the undisturbed run of the same configuration,
and to leave nothing behind."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from megarl.checkpoint.manifest import verify
from megarl.distributed.ray_watch import CONTROL
from megarl.distributed.ray_watch import RAYLET as OWN_RAYLET
from megarl.errors import WorkerLostError
from megarl.observe.launches import FINISHED, WORKERS, read_launches
from megarl.observe.launches import Launch as RecordedLaunch
from tests.faults import told as promised
from tests.faults.fault import (
    ANY,
    BACK,
    DRIVER,
    GCS,
    INIT,
    LASTING,
    RAYLET,
    READ,
    STANDS_STILL,
    Fault,
    MissedError,
)
from tests.faults.leftovers import Footprint
from tests.faults.workers import engines_of, ranks_of, reward_processes_of, slow_down, step_of, strike
from tests.system.whole_runs import LONGEST_WAIT_S, ROOT, Launch, Launches, comparable, read_rows

READY_FIRST = "ready_first"
OF_ENGINES = ("train/rollouts_", "train/engine_check")
SEAM = Path(__file__).parent / "seam"
_DEADLINE_S = 15.0
"""Least deadline of a phase while ranks are stopped; three times the slowest step, where that is longer."""
_STOP_DEADLINE_S = 20.0
"""The same where a process of Ray is stopped: within it the launch has to have ended."""
_FOUND_WITHIN = 6.0
"""Of such deadlines: by then a rank that is lost or stands still was found, and the others were ended. Some
of it is the load beside."""
_FAILED_SAVE = re.compile(
    r"the checkpoint of step (?P<step>\d+) could not be written: .*?Training continues", re.DOTALL
)
_SIGNALS = {"kill": signal.SIGKILL, "hang": signal.SIGSTOP}
_SHELL = 'mount -t tmpfs -o size="$0" tmpfs "$1" && shift && exec "$@"'
_STORAGE_EXIT = 1
_CONSTRUCTION_S = 0.5
_POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class Subject:
    """A configuration that faults are tried on.

    Attributes:
        name: of it, for files and reports.
        config: its file.
        arguments: overrides and options of ``megarl train`` after it.
        directory: that it is run in: relative paths of the configuration mean this one.
    """

    name: str
    config: Path
    arguments: tuple[str, ...] = ()
    directory: Path = ROOT

    @property
    def fingerprint(self) -> str:
        """Changes where the file or the arguments do; not where a file does that it inherits from."""
        said = json.dumps([self.config.read_text(), self.arguments, str(self.directory)])
        return hashlib.sha256(said.encode()).hexdigest()[:16]

    @property
    def is_repeated(self) -> bool:
        """True if what it trains on hangs on time: it has to equal what its ledger repeats."""
        return any(each.endswith(f"schedule={READY_FIRST}") for each in self.arguments)


@dataclass(frozen=True, slots=True)
class Whole:
    """The undisturbed run of a configuration.

    Attributes:
        run_dir: of it.
        steps: number of its last step.
        first: 0 where it validates before the first step, else 1.
        ranks: workers of the policy.
        names: of them in messages, by rank.
        step_s: seconds of its slowest step with all that belongs to it.
        checkpoint_bytes: of its largest checkpoint.
    """

    run_dir: Path
    steps: int
    first: int
    ranks: int
    names: tuple[str, ...]
    step_s: float
    checkpoint_bytes: int


@dataclass
class Told:
    """What a trial has to say of itself.

    Attributes:
        words: of what happened, in order.
        seconds: that it took in all.
    """

    words: list[str] = field(default_factory=list)
    seconds: float = 0.0


class Trials:
    """Runs of one configuration, undisturbed and with faults.

    Args:
        subject: the configuration.
        work: directory that all of it is written below.
        patience_s: longest wait for a moment or an end of a launch.
    """

    def __init__(self, subject: Subject, work: Path, patience_s: float = LONGEST_WAIT_S) -> None:
        self.subject, self.work, self._patience_s = subject, work / subject.name, patience_s
        self.work.mkdir(parents=True, exist_ok=True)

    # every trial saves and exports, or nothing could be compared
    _COMMON = (
        "++checkpointing.enabled=true",
        "++checkpointing.export_hf=true",
        "++policy.on_nonfinite=raise",
    )

    def whole(self) -> Whole:
        """The undisturbed run, which is made once.

        Raises:
            AssertionError: it failed, left something behind, or learned so little that no loss could be seen.
        """
        run_dir, facts = self.work / "whole", self.work / f"whole-{self.subject.fingerprint}.json"
        if not facts.is_file():
            assert not run_dir.exists(), (
                f"{run_dir} is of another configuration, or was not finished. Fix: remove it"
            )
            with Footprint() as footprint:
                launches = Launches(self._patience_s)
                try:
                    launch = self.start(
                        launches,
                        run_dir,
                        footprint,
                        ["++checkpointing.save_period=1", "++checkpointing.keep_top_k=null"],
                    )
                    launch.await_moment(lambda: bool(read_rows(run_dir)))
                    ranks = len(ranks_of(launch))
                    assert launch.finish() == 0, launch.output()[-5000:]
                    left = footprint.left(run_dir)
                    assert not left, f"an undisturbed run leaves something behind: {left}"
                finally:
                    launches.close()
            facts.write_text(json.dumps({"ranks": ranks}))
        return self._look_at(run_dir, json.loads(facts.read_text())["ranks"])

    def _look_at(self, run_dir: Path, ranks: int) -> Whole:
        rows = read_rows(run_dir)
        trained = [row for row in comparable(run_dir) if row["step"]]
        assert sum(row.get("train/grad_norm", 0) > 0 for row in trained) >= 2, (
            "it learns nothing, so that no loss could be seen"
        )
        saved = [
            sum(path.stat().st_size for path in each.rglob("*") if path.is_file())
            for each in _checkpoints(run_dir)
        ]
        slowest = max(b["time"] - a["time"] for a, b in itertools.pairwise(rows))
        names = promised.coordinates(run_dir)
        assert len(names) == ranks, (
            f"the configuration is of ranks {names}, and the policy has {ranks} workers"
        )
        return Whole(run_dir, rows[-1]["step"], rows[0]["step"], ranks, tuple(names), slowest, max(saved))

    def run(self, name: str, faults: Sequence[Fault], within: bool, overrides: Sequence[str] = ()) -> Told:
        """A run with faults, in the order of their steps.

        Args:
            name: of its directory.
            faults: at least one.
            within: a launch may build lost workers anew, instead of being started again.
            overrides: of keys on which no loss or weight depends.

        Raises:
            AssertionError: something promised is not true.
        """
        whole, begun = self.whole(), time.monotonic()
        assert all(fault.step <= whole.steps for fault in faults), f"the run has {whole.steps} steps"
        assert all((fault.rank or 0) < whole.ranks for fault in faults), (
            f"the policy has {whole.ranks} workers"
        )
        run_dir = self.work / name
        assert not run_dir.exists(), f"{run_dir} exists. Fix: remove it"
        launches, told = Launches(self._patience_s), Told()
        with Footprint() as footprint:
            trial = Trial(self, whole, run_dir, footprint, launches, told, within, tuple(overrides))
            try:
                trial.go(list(faults))
                trial.judge()
            finally:
                launches.close()
        told.seconds = time.monotonic() - begun
        return told

    def start(
        self,
        launches: Launches,
        run_dir: Path,
        footprint: Footprint,
        overrides: Sequence[str],
        prefix: Sequence[str] = (),
    ) -> Launch:
        """A launch of the configuration, that can be given orders; see ``Launches.start``."""
        path = os.pathsep.join(str(each) for each in (SEAM, ROOT))
        return launches.start(
            self.subject.config,
            run_dir,
            [
                *self.subject.arguments,
                *self._COMMON,
                f"++checkpointing.checkpoint_dir={run_dir / 'checkpoints'}",
                *overrides,
            ],
            {**footprint.variables, "PYTHONPATH": path},
            directory=self.subject.directory,
            prefix=prefix,
        )


def _checkpoints(run_dir: Path) -> list[Path]:
    return sorted((run_dir / "checkpoints").glob("step_*"))


@dataclass
class Trial:
    """A run with faults that is under way.

    Attributes:
        restarts: of workers within launches, so far.
        old: processes of workers that the last fault met.
        deadline_s: of a phase, where faults need one.
        begun: unix seconds of the last fault.
        spoken: bytes that its launch had said before.
        step: that the launch was in.
    """

    of: Trials
    whole: Whole
    run_dir: Path
    footprint: Footprint
    launches: Launches
    told: Told
    within: bool
    overrides: tuple[str, ...]
    restarts: int = 0
    old: tuple[int, ...] = ()
    deadline_s: float | None = None
    begun: float = 0.0
    spoken: int = 0
    step: int = 0

    def go(self, faults: list[Fault]) -> None:
        """Start it, let the faults happen, and start it again as often as they end it."""
        disk = any(fault.kind == "disk_full" for fault in faults)
        prefix = self._small_disk() if disk else []
        settings = self._settings(faults)
        launch = self._launch(settings, prefix)
        while faults:
            fault = faults.pop(0)
            happened = self._let_happen(launch, fault)
            code = happened.exit_code(self.within)
            if happened.kind == "engine":
                code = self._await_engines(launch)
            elif code is BACK:
                self._await_recovery(launch, happened)
            if code is BACK:
                continue
            if self._await_end(launch, happened, code) == 0:
                # told to stop in its last step, or over before an engine or a process of Ray was missed
                if faults and happened.kind in ("stop", "engine", "term"):
                    raise MissedError(f"{faults[0]} did not happen: the run was over")
                assert not faults, f"the run is over, and {faults[0]} was to come"
                break
            if happened.kind == "eio":
                self._start_with_reads_that_fail(happened, settings)
            launch = self._launch(settings, prefix)
        code = launch.finish()
        assert code == 0, f"the last launch ended with {code}:\n{launch.output()[-5000:]}"
        if disk:
            self._check_warned_of_space(launch)
            self._disk.rmdir()

    def judge(self) -> None:
        """What has to be true after all of it."""
        same = self._repeat() if self.of.subject.is_repeated else self.whole.run_dir
        rows, expected = _without_engines(self.run_dir), _without_engines(same)
        assert rows == expected, f"the log differs: {_first_difference(rows, expected)}"
        weights = _weights(self.run_dir, self.whole.steps)
        assert weights and weights == _weights(same, self.whole.steps), "the final weights differ"
        damaged = {path.name: problems for path in _checkpoints(self.run_dir) if (problems := verify(path))}
        assert not damaged, f"damaged checkpoints: {damaged}"
        recorded = read_launches(self.run_dir)
        assert recorded[-1].outcome == FINISHED
        counted = self._restarts().count(WORKERS)
        assert counted == self.restarts, (
            f"{counted} restarts of workers are recorded, there were {self.restarts}"
        )
        left = self.footprint.left(self.run_dir)
        assert not left, f"left behind: {left}"
        ordered = sorted(path.name for path in self.footprint.orders.iterdir())
        assert not ordered, f"did not happen: {ordered}"
        launches = len(recorded)
        self.told.words.append(
            f"{launches} launches, {counted} restarts within; log and weights equal; nothing left"
        )

    def _repeat(self) -> Path:
        """The run that the ledger gives without engines; each prompt is in it once, as an epoch has more of
        them than the run takes."""
        ledger = sorted((self.run_dir / "ledger").glob("step_*.json"))
        steps = [json.loads(path.read_text())["records"] for path in ledger]
        prompts = [record for records in steps for record in dict.fromkeys(records)]
        assert len(steps) == self.whole.steps and len(prompts) == len(set(prompts)), (
            f"a prompt was trained on twice: {sorted(prompts)}"
        )
        again = self.run_dir.with_name(f"{self.run_dir.name}.again")
        settings = ["++checkpointing.save_period=100", f"grpo.async_grpo.replay={self.run_dir}"]
        launch = self.of.start(self.launches, again, self.footprint, settings)
        assert launch.finish() == 0, launch.output()[-5000:]
        return again

    def _settings(self, faults: Sequence[Fault]) -> list[str]:
        settings = ["++checkpointing.save_period=1", "++checkpointing.keep_top_k=null", *self.overrides]
        settings.append(f"++cluster.max_restarts={len(faults) if self.within else 0}")
        settings.append(f"++checkpointing.max_failed_saves={len(faults) + 1}")
        if any(fault.kind in (*STANDS_STILL, "stop") for fault in faults):
            least_s = _STOP_DEADLINE_S if any(fault.kind == "stop" for fault in faults) else _DEADLINE_S
            self.deadline_s = max(least_s, 3 * self.whole.step_s)
            settings.append(f"++deadlines.least_s={self.deadline_s:g}")
        return settings

    def _launch(self, settings: Sequence[str], prefix: Sequence[str] = ()) -> Launch:
        return self.of.start(self.launches, self.run_dir, self.footprint, settings, prefix)

    def _let_happen(self, launch: Launch, fault: Fault) -> Fault:
        """Wait for the moment, and cause the fault; returns it with the step that it happened in."""
        ranks = self._await_workers(launch, fault)
        while True:
            self._await_step(launch, fault)
            if self._await_phase(launch, fault, ranks):
                break
            if fault.step == self.whole.steps:
                raise MissedError(f"{fault} did not happen: the run was past it")
            fault = fault.later()
        self.told.words.append(f"{fault} happened")
        return fault

    def _await_workers(self, launch: Launch, fault: Fault) -> list[int]:
        found: list[int] = []

        def there() -> bool:
            found[:] = ranks_of(launch)
            return len(found) == self.whole.ranks and not set(found) & set(self.old)

        launch.await_moment(there)
        for kind, others in {"engine": engines_of, "rewards": reward_processes_of}.items():
            if fault.kind == kind:
                launch.await_moment(lambda others=others: bool(others(launch)))  # type: ignore[misc]
        return found

    def _step(self, launch: Launch) -> int:
        return step_of(launch, self.whole.first)

    def _await_step(self, launch: Launch, fault: Fault) -> None:
        """Wait until the step has begun; construction, which ``INIT`` is, comes before it."""
        if fault.phase != INIT:
            launch.await_moment(lambda: self._step(launch) >= fault.step)

    def _await_phase(self, launch: Launch, fault: Fault, ranks: Sequence[int]) -> bool:
        """Whether the moment came before the step was over; then the fault has been caused."""
        if fault.phase in (ANY, INIT):
            # a worker has much to load before it is constructed
            end = time.monotonic() + (
                _CONSTRUCTION_S if fault.phase == INIT else fault.share * self.whole.step_s
            )
            launch.await_moment(
                lambda: time.monotonic() >= end or (fault.phase == ANY and self._step(launch) > fault.step)
            )
            # one of them may have been started anew while they were constructed
            now = ranks_of(launch)
            ranks = now if len(now) == len(ranks) else ranks
            self._mark(launch, ranks)
            self._cause(launch, fault, ranks)
            return True
        met: list[bool] = []

        def happened() -> bool:
            self._mark(launch, ranks)
            met[:] = [self._cause_in_phase(launch, fault, ranks)]
            return met[0] or self._step(launch) > fault.step

        launch.await_moment(happened)
        if met[0]:
            # while one rank is in the phase, none can go on to the next step
            self.step = self._step(launch)
        return met[0]

    def _mark(self, launch: Launch, ranks: Sequence[int]) -> None:
        """Note where the launch is, right before a fault."""
        self.old, self.begun, self.spoken, self.step = (
            tuple(ranks),
            time.time(),
            launch.spoken(),
            self._step(launch),
        )

    def _cause_in_phase(self, launch: Launch, fault: Fault, ranks: Sequence[int]) -> bool:
        """Cause the fault if the rank is in its phase now, the first where it has none; whether it was."""
        if fault.rank is not None:
            return strike(ranks[fault.rank], fault.phase, _SIGNALS[fault.kind])
        if not strike(ranks[0], fault.phase, 0):
            return False
        self._cause(launch, fault, ranks)
        return True

    def _cause(self, launch: Launch, fault: Fault, ranks: Sequence[int]) -> None:
        match fault.kind:
            case "kill" | "hang" if fault.rank is not None:
                os.kill(ranks[fault.rank], _SIGNALS[fault.kind])
            case "kill":
                launch.kill_when(lambda: True)
            case "engine" | "rewards":
                others = engines_of if fault.kind == "engine" else reward_processes_of
                os.kill(others(launch)[0], signal.SIGKILL)
            case "slow":
                slow_down(ranks[fault.rank or 0], fault.seconds)
            case "nan" | "oom" | "stuck":
                (self.footprint.orders / f"{fault.kind}-{fault.rank}").touch()
            case "eio" if fault.on == READ:
                launch.kill_when(lambda: True)
            case "eio":
                self._order_io_errors(fault, str(fault.rank), self.run_dir / "checkpoints")
                self._require_a_save_behind(launch, str(fault.rank))
            case "disk_full":
                self._fill_disk(launch)
            case "term":
                os.killpg(launch.process.pid, signal.SIGTERM)
            case "gcs" | "node":
                os.kill(_of_ray(launch, GCS if fault.kind == "gcs" else RAYLET), signal.SIGKILL)
            case "stop":
                os.kill(_of_ray(launch, fault.of), signal.SIGSTOP)

    def _await_recovery(self, launch: Launch, fault: Fault) -> None:
        """Wait until a launch has got over a fault that does not end it."""
        if fault.kind in ("kill", *STANDS_STILL):
            self.restarts += 1
            launch.await_moment(lambda: self._restarts().count(WORKERS) == self.restarts)
            restart = [
                each
                for launch in read_launches(self.run_dir)
                for each in launch.restarts
                if each.what == WORKERS
            ][-1]
            self.told.words.append(f"workers ended after {restart.time - self.begun:.1f} s")
            expected = "DeadlineError" if fault.kind in STANDS_STILL else "WorkerLostError"
            assert restart.reason.startswith(expected), f"the restart says {restart.reason!r}, not {expected}"
            self._check_loss(launch, fault, restart.time)
            return
        self.old = ()
        if fault.kind == "eio":
            who = str(fault.rank)
            self._await_failed_save(launch, lambda: self._refusals(who) > 0)
            self._take_order_back(who)
        if fault.kind == "disk_full":
            self._await_failed_save(launch, lambda: True, "no space: a checkpoint takes about")
            _filler(launch, self._disk).unlink()

    def _await_engines(self, launch: Launch) -> int | None:
        """Wait until a launch has got over the loss of an engine, or has ended by it. Engines alone are
        replaced where the policy has the weights that they had; else all workers go back to the newest
        checkpoint, which the launch may have to leave to the next one."""
        end, before = time.monotonic() + self.launches.patience_s, self._restarts()
        while launch.process.poll() is None and self._restarts() == before:
            assert time.monotonic() < end, f"the loss of an engine is not seen:\n{launch.output()[-3000:]}"
            launch.stay(_POLL_S)
        if launch.process.poll() is not None:
            return WorkerLostError.exit_code
        what = self._restarts()[-1]
        self.told.words.append(f"{what} were started anew")
        self.restarts += what == WORKERS
        self.old = self.old if what == WORKERS else ()
        return BACK

    def _restarts(self) -> list[str]:
        """What was started anew within the launches so far."""
        return [restart.what for each in read_launches(self.run_dir) for restart in each.restarts]

    def _await_failed_save(self, launch: Launch, happened: Callable[[], bool], why: str = "") -> None:
        """Wait until a save has failed after the fault, and is warned of with the reason; what there was of
        it is gone then."""
        launch.await_moment(
            lambda: happened() and _FAILED_SAVE.search(launch.output(self.spoken)) is not None
        )
        warned = _FAILED_SAVE.search(launch.output(self.spoken))
        assert warned is not None and why in warned[0], (
            f"it does not say {why!r}:\n{launch.output(self.spoken)[-3000:]}"
        )
        directory = self.run_dir / "checkpoints" if not self._disk.is_dir() else _seen_by(launch, self._disk)
        rest = directory / f"tmp_step_{warned['step']}"
        assert not rest.exists(), (
            f"what there is of a checkpoint that could not be written is still there: {rest}"
        )

    def _check_loss(self, launch: Launch, fault: Fault, ended: float) -> None:
        """Whether a rank that was lost or stood still was named, and found in time where the trial has set a
        deadline."""
        said, who = launch.output(self.spoken), self.whole.names[fault.rank or 0]
        if fault.kind == "engine":
            promised.check_engine_is_told(said)
        elif fault.kind == "stuck":
            promised.check_standstill_is_told(said, who)
        else:
            check = promised.check_silence_is_told if fault.kind == "hang" else promised.check_loss_is_told
            check(said, who, fault.phase, self.step, self.whole.steps)
        if self.deadline_s is not None:
            took, bound = ended - self.begun, _FOUND_WITHIN * self.deadline_s
            assert took <= bound, (
                f"{fault} ended the workers after {took:.1f} s, at a deadline of {self.deadline_s:g} s; at "
                f"most {bound:g} s"
            )
        self._check_checkpoints(fault)

    def _check_checkpoints(self, fault: Fault) -> None:
        broken = {path.name: problems for path in _checkpoints(self.run_dir) if (problems := verify(path))}
        assert not broken, f"after {fault} a checkpoint is damaged: {broken}"

    def _await_end(self, launch: Launch, fault: Fault, code: int) -> int:
        begun = time.monotonic()
        found = launch.finish()
        expected = {code, 0} if fault.kind in ("term", "stop", "engine") else {code}
        assert found in expected, (
            f"after {fault} the launch ended with {found}, not with {code}:\n{launch.output()[-5000:]}"
        )
        self.told.words.append(f"exit code {found} after {time.monotonic() - begun:.1f} s")
        if self.run_dir.is_dir():
            self._check_checkpoints(fault)
        self._check_end(launch, fault, found)
        return found

    def _check_end(self, launch: Launch, fault: Fault, code: int) -> None:
        """Whether a launch that a fault ended has said what is promised."""
        said = launch.output(self.spoken)
        match fault.kind:
            case "kill" | "hang" | "engine" if code and (fault.rank is not None or fault.kind == "engine"):
                recorded = read_launches(self.run_dir)[-1]
                assert recorded.end is not None, "the end of the launch is not recorded"
                self._check_loss(launch, fault, recorded.end)
            case "nan":
                promised.check_not_finite_is_told(said, self.whole.names)
            case "oom":
                promised.check_memory_is_told(said, self.whole.names[fault.rank or 0])
            case "stop" if code:
                recorded = read_launches(self.run_dir)[-1]
                self._check_stop_is_told(fault, recorded, said)
            case "gcs" | "node":
                recorded = read_launches(self.run_dir)[-1]
                assert (recorded.outcome or "").startswith("WorkerLostError: "), (
                    f"the launch is recorded to have ended so: {recorded}"
                )
                if fault.kind == "gcs":
                    assert "Ray's control process (GCS)" in said, (
                        f"it does not name Ray's control process:\n{said[-3000:]}"
                    )
            case "term":
                assert "SIGTERM" in said, f"it does not say 'SIGTERM':\n{said[-3000:]}"
                if code:
                    self._check_saved(said)

    def _check_stop_is_told(self, fault: Fault, recorded: RecordedLaunch, said: str) -> None:
        """Whether a launch has ended in time, and said which process of Ray is stopped."""
        assert (recorded.outcome or "").startswith("WorkerLostError: "), (
            f"the launch is recorded to have ended so: {recorded}"
        )
        assert self.deadline_s is not None and recorded.end is not None
        took = recorded.end - self.begun
        assert took <= self.deadline_s, (
            f"{fault} ended the launch after {took:.1f} s, at a deadline of {self.deadline_s:g} s"
        )
        name = CONTROL if fault.of == GCS else OWN_RAYLET
        assert re.search(rf"{re.escape(name)} at \S+ has not answered for \d+ s", said), (
            f"it does not name {name}:\n{said[-3000:]}"
        )
        self.told.words.append(f"ended {took:.1f} s after the stop")

    def _check_saved(self, said: str) -> None:
        """Whether a launch that was told to stop has saved the step that it stopped after."""
        # A launch that builds its workers anew is in no step that it could finish and save.
        if "SIGTERM: stopping at once, outside of the training loop" in said:
            return
        told = re.search(r"stopped after step (\d+) \(SIGTERM\)", said)
        assert told is not None, f"it does not say after which step it stopped:\n{said[-3000:]}"
        newest = self._newest()
        assert newest == int(told[1]), (
            f"it stopped after step {told[1]}, and its newest checkpoint is of step {newest}"
        )

    def _newest(self) -> int:
        """The step of the newest checkpoint; 0 where there is none."""
        return max((int(path.name.removeprefix("step_")) for path in _checkpoints(self.run_dir)), default=0)

    def _start_with_reads_that_fail(self, fault: Fault, settings: Sequence[str]) -> None:
        """The next launch, whose driver cannot read its checkpoints for a moment, or for good."""
        newest = self._newest()
        if not newest:
            raise MissedError(f"{fault} did not happen: there is no checkpoint to read")
        self._order_io_errors(fault, DRIVER, self.run_dir / "checkpoints")
        order = self.footprint.orders / f"eio-{DRIVER}"
        launch = self._launch(settings)
        if fault.count == LASTING:
            code = launch.finish()
            assert code == _STORAGE_EXIT and "fault of the storage" in launch.output(), (
                f"{code}:\n{launch.output()[-5000:]}"
            )
            self.told.words.append(
                f"storage that stays away ended the start, after {self._refusals(DRIVER)} reads"
            )
            assert self._refusals(DRIVER), "nobody read"
            self._take_order_back(DRIVER)
            launch = self._launch(settings)
        launch.await_moment(lambda: re.search(r"resumed after step (\d+)", launch.output()) is not None)
        resumed = re.search(r"resumed after step (\d+)", launch.output())
        assert resumed is not None and int(resumed[1]) == newest, (
            f"it went on after another step than {newest}:\n{launch.output()[-3000:]}"
        )
        if fault.count < LASTING:
            assert not order.exists() and self._refusals(DRIVER) == fault.count, (
                f"{self._refusals(DRIVER)} reads failed of {fault.count}"
            )
            self._take_order_back(DRIVER)
        self.told.words.append(f"resumed after step {newest}")
        # the trial goes on with a launch of its own
        launch.await_moment(lambda: len(ranks_of(launch)) == self.whole.ranks)
        self.old = tuple(ranks_of(launch))
        launch.kill_when(lambda: True)

    def _order_io_errors(self, fault: Fault, who: str, below: Path) -> None:
        path = self.footprint.orders / f"eio-{who}"
        temporary = path.with_name(f".{path.name}")
        temporary.write_text(f"{fault.on}\n{fault.count}\n{below}\n")
        temporary.rename(path)

    def _refusals(self, who: str) -> int:
        """How often an order of I/O errors was carried out so far."""
        path = self.footprint.orders / f"refused-eio-{who}"
        return path.stat().st_size if path.exists() else 0

    def _take_order_back(self, who: str) -> None:
        """The rest of an order of I/O errors, and the count of those that there were."""
        for name in (f"eio-{who}", f"refused-eio-{who}"):
            (self.footprint.orders / name).unlink(missing_ok=True)

    def _require_a_save_behind(self, launch: Launch, who: str) -> None:
        """Take an order back that came so late that the last save would fail, after which the run ends."""
        if self._step(launch) >= self.whole.steps and not self._refusals(who):
            self._take_order_back(who)
            raise MissedError("a save was to fail that another one follows: the run was past it")

    @property
    def _disk(self) -> Path:
        return self.run_dir.with_name(f"{self.run_dir.name}-disk")

    def _small_disk(self) -> list[str]:
        """Begins the command of a launch whose checkpoints lie on a disk of their own, that is gone with
        it."""
        self._disk.mkdir()
        self.overrides = (*self.overrides, f"++checkpointing.checkpoint_dir={self._disk}")
        size = (self.whole.steps + 2) * self.whole.checkpoint_bytes + (1 << 20)
        return ["unshare", "--mount", "sh", "-c", _SHELL, str(size), str(self._disk)]

    def _fill_disk(self, launch: Launch) -> None:
        """Leave less room than a checkpoint takes."""
        with _filler(launch, self._disk).open("wb", buffering=0) as stream:
            block = b"\0" * 65536
            try:
                while True:
                    stream.write(block)
            except OSError:
                return

    def _check_warned_of_space(self, launch: Launch) -> None:
        said = launch.output()
        assert "no space: a checkpoint takes about" in said and "Training continues" in said, said[-3000:]
        self.told.words.append("warned: no space")


def _filler(launch: Launch, disk: Path) -> Path:
    """A file on the disk of a launch."""
    return _seen_by(launch, disk) / "filler"


def _seen_by(launch: Launch, path: Path) -> Path:
    """A path as a launch has it, which may have mounted something there."""
    return Path(f"/proc/{launch.process.pid}/root{path}")


def _of_ray(launch: Launch, name: str) -> int:
    """Process id of a process of the launch's Ray: ``RAYLET`` or ``GCS``."""
    program = {RAYLET: "raylet/raylet", GCS: "gcs_server"}[name]
    [pid] = [pid for pid, words in launch.processes().items() if words.split(" ")[0].endswith(program)]
    return pid


def _weights(run_dir: Path, step: int) -> Mapping[str, str]:
    """Hash of every file of weights of the export after a step."""
    return {
        path.relative_to(run_dir).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted((run_dir / "hf" / f"step_{step}").rglob("*.safetensors"))
    }


def _without_engines(run_dir: Path) -> list[dict[str, object]]:
    """The rows of a log without what only a run with engines has; a repeated one has none."""
    return [
        {key: value for key, value in row.items() if not key.startswith(OF_ENGINES)}
        for row in comparable(run_dir)
    ]


def _first_difference(rows: Sequence[Mapping[str, object]], expected: Sequence[Mapping[str, object]]) -> str:
    for row, other in zip(rows, expected, strict=False):
        for key in {**row, **other}:
            if row.get(key) != other.get(key):
                return f"step {row.get('step')}, {key}: {row.get(key)!r}, undisturbed {other.get(key)!r}"
    return f"{len(rows)} rows, undisturbed {len(expected)}"


def can_mount() -> bool:
    """Whether a disk of its own can be made for a run: needs the right to mount."""
    tried = subprocess.run(["unshare", "--mount", "true"], capture_output=True, check=False)
    return tried.returncode == 0
