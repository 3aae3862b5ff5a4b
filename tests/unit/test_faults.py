"""The parts of the harness that injects faults into whole runs (``tests/faults``): what it reads, draws,
notes, sees and orders.

Whole runs with faults: ``tests/system/test_faults.py``.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import psutil
import pytest

from megarl import env
from megarl.checkpoint.background import memory_of
from megarl.checkpoint.manager import CheckpointManager
from megarl.distributed.worker_stacks import read_stack
from megarl.models.engine.nonfinite import NonFiniteMicroBatch, SkippedBatch
from megarl.observe.launches import FINISHED, WORKERS, recorded_launch
from tests.faults import leftovers
from tests.faults import told as promised
from tests.faults.fault import (
    ANY,
    BACK,
    INIT,
    KINDS,
    PHASES,
    READ,
    WRITE,
    Draw,
    Fault,
    FaultError,
    MissedError,
    draw,
    parse,
)
from tests.faults.leftovers import SHARED_MEMORY, VARIABLE, Footprint
from tests.faults.soak import Entry, Journal, counted, left_to_do
from tests.faults.trial import SEAM, Subject, Told, Trial, Trials, Whole
from tests.faults.workers import phase_in, slow_down, strike
from tests.system.whole_runs import Launch, Launches
from tests.tables import read_table
from tests.tiers import sampled, slow

TABLES = read_table("faults.yaml")

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("kill:rank=1,phase=train,step=3", Fault("kill", 3, "train", 1, share=0.5)),
        ("kill:rank=driver,step=2,share=0.25", Fault("kill", 2, ANY, None, share=0.25)),
        ("hang:step=2", Fault("hang", 2, ANY, 0, share=0.5)),
        ("slow:rank=1,seconds=2.5", Fault("slow", 1, ANY, 1, share=0.5, seconds=2.5)),
        ("eio:on=read,count=99,step=4", Fault("eio", 4, ANY, 0, on=READ, count=99)),
        ("disk_full", Fault("disk_full", 1)),
        ("gcs:step=2,phase=any", Fault("gcs", 2, share=0.5)),
        ("stop:of=gcs,step=3", Fault("stop", 3, share=0.5, of="gcs")),
    ],
)
def test_a_fault_is_read(text: str, fault: Fault) -> None:
    assert parse(text) == fault
    assert parse(str(fault)) == fault


@pytest.mark.parametrize(
    ("text", "said"),
    TABLES["what makes no sense is refused"],
)
def test_what_makes_no_sense_is_refused(text: str, said: str) -> None:
    with pytest.raises(FaultError, match=said):
        parse(text)


def test_every_fault_has_a_row_and_a_promise_and_ends_the_launch_or_not() -> None:
    for kind, on, phase, rank in itertools.product(KINDS, (READ, WRITE), PHASES, (None, 1)):
        fault = Fault(kind, 1, phase, rank, on=on)
        assert fault.row and fault.promise
        assert fault.exit_code(within=True) in (BACK, -9, 1, 4, 75)
    assert Fault("kill", 1, ANY, 0).exit_code(True) is BACK and Fault("kill", 1, ANY, 0).exit_code(False) == 4
    assert Fault("kill", 1, ANY, None).exit_code(True) == -9
    assert [Fault("kill", 1, phase, 0).row for phase in ("train", "save")] == ["1", "3"]


def phases_of(drawn: Iterable[Draw]) -> set[str]:
    return {fault.phase for each in drawn for fault in each.faults if fault.kind == "kill"}


def test_faults_are_drawn_alike_at_every_start_and_can_happen() -> None:
    subjects = [(2, 4), (1, 1), (3, 7)]
    drawn = [draw(5, number, subjects) for number in range(400)]
    assert (
        drawn
        == [draw(5, number, subjects) for number in range(400)]
        != [draw(6, number, subjects) for number in range(400)]
    )
    met = {fault.kind for each in drawn for fault in each.faults}
    assert met == set(KINDS)
    assert phases_of(drawn) == set(PHASES) - {"refit", "generate"}, "workers that train generate nothing"
    assert phases_of(draw(5, number, subjects, ["kill"]) for number in range(400)) == set(PHASES) - {"refit"}
    for each in drawn:
        ranks, steps = subjects[each.subject]
        assert each.faults and each.subject == each.number % 3
        assert len(each.faults) == 1 or not any(KINDS[fault.kind].alone for fault in each.faults)
        for fault in each.faults:
            assert parse(str(fault)).kind == fault.kind
            assert 1 <= fault.step <= steps and (fault.rank is None or fault.rank < ranks)
            assert fault.phase != INIT or fault.step == 1
            fails_to_save = fault.kind == "disk_full" or (fault.kind == "eio" and fault.on == WRITE)
            assert not fails_to_save or steps == 1 or fault.step < steps, "no save follows the last one"
            assert not fails_to_save or (each.save_period, each.async_save) == (1, False)
        failing = [
            fault.step
            for fault in each.faults
            if fault.kind == "disk_full" or (fault.kind, fault.on) == ("eio", WRITE)
        ]
        assert len(set(failing)) == len(failing), (
            "each is of a step of its own, or the second meets the save behind"
        )
        assert [fault.step for fault in each.faults] == sorted(fault.step for fault in each.faults)
    long = [draw(5, number, [(2, 8)], ["kill", "engine", "rewards"]) for number in range(40)]
    assert {len(each.faults) for each in long} == {4, 5, 6}
    only = [draw(5, number, subjects, ["hang"]) for number in range(20)]
    assert {fault.kind for each in only for fault in each.faults} == {"hang"}


def entry(number: int, passed: bool = True, *faults: str) -> Entry:
    return Entry(
        number,
        "tiny",
        faults or (str(Fault("kill", 1, rank=0)),),
        ("1",) * max(1, len(faults)),
        passed,
        "",
        1.0,
    )


def test_a_soak_goes_on_where_it_was(tmp_path: Path) -> None:
    path, identity = tmp_path / "journal.jsonl", {"seed": 1, "subjects": {"tiny": "abc"}}

    def draws() -> itertools.chain[Draw]:
        return itertools.chain(
            Draw(number, 0, (Fault("kill", 1), Fault("kill", 2)), True, 1, False)
            for number in itertools.count()
        )

    journal = Journal(path, identity)
    for each in left_to_do(journal, draws(), 5):
        journal.add(entry(each.number, each.number != 1, str(each.faults[0]), str(each.faults[1])))
        if each.number == 1:
            break
    assert [each.number for each in journal.entries] == [0, 1]
    with path.open("a") as stream:
        stream.write('{"number": 2, "subj')

    again = Journal(path, identity)
    assert again.entries == journal.entries and again.faults == 4
    for each in left_to_do(again, draws(), 5):
        again.add(entry(each.number, True, str(each.faults[0]), str(each.faults[1])))
    assert [each.number for each in Journal(path, identity).entries] == [0, 1, 2]
    assert list(left_to_do(again, draws(), 6)) == []
    with pytest.raises(FaultError, match="of another soak"):
        Journal(path, {**identity, "seed": 2})


def test_faults_are_counted_by_kind_and_configuration() -> None:
    other = Entry(
        2,
        "other",
        ("kill:rank=driver,step=1", "eio:rank=0,on=read,count=2,step=3"),
        ("2", "6"),
        True,
        "",
        1.0,
    )
    assert counted([entry(0), entry(1, False), other]).splitlines() == [
        "| kind | tiny | other | all |",
        "|---|---|---|---|",
        "| eio read |  | 1 of 1 | 1 of 1 |",
        "| kill driver |  | 1 of 1 | 1 of 1 |",
        "| kill worker | 1 of 2 |  | 1 of 2 |",
        "| all | 1 of 2 | 2 of 2 | 3 of 4 |",
    ]


PLAYED = """
import sys, time
sys.path[:] = {path!r}
from megarl.distributed.worker_stacks import register_stacks
register_stacks("lm_policy-0-0")
def decorated(function):
    def wrapper(*args): return function(*args)
    return wrapper
def wait():
    print("ready", flush=True)
    sys.stdin.read()
class Worker:
    @decorated
    def {method}(self): wait()
shell = "def call(method): method()\\ndef construct(make): make()\\n"
exec(compile(shell, "/x/megarl/distributed/worker_shell.py", "exec"))
{run}
"""


@pytest.mark.parametrize(
    ("method", "run", "phase"),
    [
        ("train", "call(Worker().train)", "train"),
        ("save_checkpoint", "call(Worker().save_checkpoint)", "save"),
        ("get_logprobs", "call(Worker().get_logprobs)", "logprobs"),
        ("hand_over_weights", "call(Worker().hand_over_weights)", "refit"),
        ("other", "call(Worker().other)", ""),
        ("train", "construct(Worker().train)", "init"),
        ("train", "Worker().train()", ""),
    ],
)
def test_the_phase_of_a_worker_is_seen_from_outside(method: str, run: str, phase: str) -> None:
    """In a real stack of a process whose frames have the names and files of a worker's."""
    child = subprocess.Popen(
        [sys.executable, "-c", PLAYED.format(path=sys.path, method=method, run=run)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        assert child.stdout is not None and child.stdout.readline() == b"ready\n"
        assert phase_in(read_stack(child.pid)) == phase
        # a signal for another phase is not sent, and one for this is
        assert not strike(child.pid, "generate", signal.SIGKILL) and child.poll() is None
        if phase:
            assert strike(child.pid, phase, signal.SIGKILL) and child.wait() == -signal.SIGKILL
            assert not strike(child.pid, phase, signal.SIGKILL), "it is gone"
    finally:
        child.kill()
        child.communicate()


def test_a_slow_process_runs_afterwards() -> None:
    child = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        slow_down(child.pid, 0.1, 0.02, 0.01)
        assert psutil.Process(child.pid).status() != psutil.STATUS_STOPPED
    finally:
        child.kill()
        child.wait()
    slow_down(child.pid, 5.0)  # gone: nothing to wait for


def test_what_is_left_behind_is_seen(tmp_path: Path) -> None:
    with Footprint() as footprint:
        # away from its parent, in a session of its own
        code = (
            "import socket, sys; s = socket.create_server(('127.0.0.1', 0)); print(s.getsockname()[1], "
            "flush=True); sys.stdin.read()"
        )
        marked = {**env.snapshot(), **footprint.variables}
        child = subprocess.Popen(
            [sys.executable, "-c", code],
            env=marked,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
            text=True,
        )
        assert child.stdout is not None
        port = int(child.stdout.readline())
        assert (
            list(footprint.processes()) == [child.pid]
            and f"listens on [{port}]" in footprint.processes()[child.pid]
        )
        child.communicate("")
        # other tests make and leave shared memory meanwhile: only what this test made is judged
        assert [each for each in footprint.left(tmp_path, 5.0) if not each.startswith("shared memory")] == []

        shared = SHARED_MEMORY / f"of-a-test-{footprint.marker}"
        shared.write_text("x")
        try:
            with shared.open():
                assert str(shared) not in footprint.shared_memory(tmp_path)
            assert str(shared) in footprint.shared_memory(tmp_path)
        finally:
            shared.unlink()
        own, other = (memory_of(run_dir / "checkpoints") for run_dir in (tmp_path, tmp_path / "other"))
        try:
            own.mkdir()
            other.mkdir()
            left = footprint.shared_memory(tmp_path)
            assert str(own) in left
            assert str(other) not in left, "another run's checkpoint waits there by right"
        finally:
            own.rmdir()
            other.rmdir()
        (footprint.directory / "socket").touch()
        (tmp_path / "checkpoints" / "tmp_step_3").mkdir(parents=True)
        assert footprint.files(tmp_path) == sorted(
            [str(footprint.directory / "socket"), str(tmp_path / "checkpoints" / "tmp_step_3")]
        )
        assert footprint.variables[VARIABLE] == footprint.marker
    assert not footprint.directory.exists()


def ordered(code: str, orders: Path | None, rank: str = "1") -> str:
    """What a program says that has the seam, with the orders that lie there."""
    variables = {
        name: value for name, value in env.snapshot().items() if name not in ("RANK", "MEGARL_TEST_FAULTS")
    }
    path = os.pathsep.join([str(SEAM), str(ROOT)])
    with_orders = {} if orders is None else {"MEGARL_TEST_FAULTS": str(orders), "RANK": rank}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**variables, "PYTHONPATH": path, **with_orders},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


OPENS = """
import errno
said = []
for number in range(4):
    for mode in "rw":
        try:
            open({path!r} + mode, mode).close()
            said.append("good")
        except OSError as error:
            said.append(errno.errorcode[error.errno])
print(*said)
"""


@pytest.mark.parametrize(
    ("order", "name", "said"),
    [
        ("read\n2\n{below}\n", "eio-1", "EIO good EIO good good good good good"),
        ("write\n1\n{below}\n", "eio-1", "good EIO good good good good good good"),
        ("read\n99\n{below}\n", "eio-1", "EIO good EIO good EIO good EIO good"),
        ("read\n2\n{below}\n", "eio-0", "good good good good good good good good"),
        ("read\n2\n/elsewhere\n", "eio-1", "good good good good good good good good"),
    ],
)
def test_files_fail_to_open_as_ordered(order: str, name: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "xr").touch()
    orders = tmp_path / "orders"
    orders.mkdir()
    (orders / name).write_text(order.format(below=tmp_path / "files"))
    code = OPENS.format(path=str(tmp_path / "files" / "x"))
    assert ordered(code, orders).strip() == said
    assert (orders / name).exists() == ("good good good" in said[:14] or "99" in order)
    refused = orders / "refused-eio-1"
    assert (refused.stat().st_size if refused.exists() else 0) == said.count("EIO")
    assert ordered(code, None).split() == ["good"] * 8


LAYERS = """
import os, sys, time, torch
torch.set_num_threads(1)
layer, orders = torch.nn.Linear(3, 2), {orders!r}
def passes():
    try:
        return bool(torch.isfinite(layer(torch.ones(1, 3))).all())
    except torch.OutOfMemoryError:
        return "no memory"
first = passes()
open(os.path.join(orders, {kind!r} + "-1"), "w").close()
with torch.no_grad():
    time.sleep(0.2)
    untrained = passes()
while (found := passes()) is True:
    time.sleep(0.005)
print(first, untrained, found, passes(), os.listdir(orders))
"""


STUCK = """
import os, sys, threading, time, torch
torch.set_num_threads(1)
layer, orders, ordered = torch.nn.Linear(3, 2), {orders!r}, threading.Event()
def look():
    ordered.wait()
    while os.listdir(orders):
        time.sleep(0.005)
    frame = sys._current_frames()[threading.main_thread().ident]
    print("stands in", frame.f_code.co_name, flush=True)
    os._exit(0)
threading.Thread(target=look).start()
open(os.path.join(orders, "stuck-1"), "w").close()
ordered.set()
while True:
    layer(torch.ones(1, 3))
"""


@sampled(1)
@pytest.mark.parametrize(
    ("kind", "said"), [("nan", "True True False True []"), ("oom", "True True no memory True []")]
)
def test_one_layer_fails_as_ordered(kind: str, said: str, tmp_path: Path) -> None:
    assert ordered(LAYERS.format(orders=str(tmp_path), kind=kind), tmp_path).strip() == said


@slow
def test_one_layer_waits_for_ever_as_ordered(tmp_path: Path) -> None:
    assert ordered(STUCK.format(orders=str(tmp_path)), tmp_path).strip() == "stands in spoil"


def test_without_orders_the_seam_does_nothing() -> None:
    code = (
        "import sys, threading; print(len(threading.enumerate()), 'torch' in sys.modules, "
        "sys.modules['sitecustomize'].DIRECTORY == '')"
    )
    assert ordered(code, None).strip() == "1 False True"


def made_run(directory: Path, losses: Sequence[float], weights: bytes, restarts: int = 0) -> Path:
    """What a run of three steps leaves: rows, launches, a checkpoint, an export."""
    directory.mkdir()
    rows = [
        {"step": step, "train/loss": loss, "time": step * 2.0 + loss, "timing/step_s": loss}
        for step, loss in enumerate(losses, 1)
    ]
    (directory / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    with recorded_launch(directory, 0, 3) as outcome:
        for _ in range(restarts):
            outcome.restarted(WORKERS, RuntimeError("lost"), 1)
        outcome.text = FINISHED
    (directory / "hf" / "step_3").mkdir(parents=True)
    (directory / "hf" / "step_3" / "model.safetensors").write_bytes(weights)
    manager = CheckpointManager({"checkpoint_dir": directory / "checkpoints"})
    manager.finalize_checkpoint(manager.init_tmp_checkpoint(3, {"step": 3}))
    return directory


JUDGED: dict[str, tuple[Callable[[Path, Footprint], Path], str]] = {
    "equal": (lambda path, _: made_run(path, [0.5, 0.25, 0.125], b"weights", 1), ""),
    "a loss": (
        lambda path, _: made_run(path, [0.5, 0.25, 0.1250000001], b"weights", 1),
        "step 3, train/loss: 0.1250000001",
    ),
    "a step less": (lambda path, _: made_run(path, [0.5, 0.25], b"weights", 1), "2 rows, undisturbed 3"),
    "a weight": (
        lambda path, _: made_run(path, [0.5, 0.25, 0.125], b"Weights", 1),
        "the final weights differ",
    ),
    "no restart": (
        lambda path, _: made_run(path, [0.5, 0.25, 0.125], b"weights", 0),
        "0 restarts of workers are recorded, there were 1",
    ),
    "a damaged checkpoint": (
        lambda path, _: damaged(made_run(path, [0.5, 0.25, 0.125], b"weights", 1)),
        "damaged checkpoints: {'step_3'",
    ),
    "a socket": (
        lambda path, footprint: with_file(path, footprint.directory / "socket"),
        "left behind: .*/t/socket",
    ),
    "an order": (
        lambda path, footprint: with_file(path, footprint.orders / "nan-1"),
        "did not happen: \\['nan-1'\\]",
    ),
}


def damaged(run_dir: Path) -> Path:
    (run_dir / "checkpoints" / "step_3" / "training_info.json").write_text("{}")
    return run_dir


def with_file(run_dir: Path, path: Path) -> Path:
    path.touch()
    return made_run(run_dir, [0.5, 0.25, 0.125], b"weights", 1)


@pytest.mark.parametrize("case", JUDGED)
def test_what_is_not_as_promised_is_found(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Clocks differ in every run, and do not count."""
    monkeypatch.setattr(leftovers, "PATIENCE_S", 0.0)
    whole = made_run(tmp_path / "whole", [0.5, 0.25, 0.125], b"weights")
    make, said = JUDGED[case]
    with Footprint() as footprint:
        run_dir = make(tmp_path / "run", footprint)
        told = Told()
        subject = Subject("made up", whole / "metrics.jsonl")
        trial = Trial(
            Trials(subject, tmp_path),
            Whole(whole, 3, 1, 2, ("pp0 dp0 cp0 tp0", "pp0 dp0 cp0 tp1"), 1.0, 1),
            run_dir,
            footprint,
            Launches(),
            told,
            True,
            (),
            restarts=1,
        )
        if not said:
            trial.judge()
            assert told.words == ["1 launches, 1 restarts within; log and weights equal; nothing left"]
            return
        with pytest.raises(AssertionError, match=said):
            trial.judge()


NAMES = ("pp0 dp0 cp0 tp0", "pp0 dp0 cp0 tp1")
LOST = (
    "x: clean-up of 'lm_policy' failed: [pp0 dp0 cp0 tp0 a.host] worker process died during shutdown: The "
    "actor died\n"
    "WARNING megarl: workers were lost, restart 1 of at most 2: [pp0 dp0 cp0 tp1 a.host] worker "
    "process died "
    "during {what}: The actor died. Fix: look\nAlso failed: [pp0 dp0 cp0 tp0 a.host]\n"
)
SILENT = (
    "megarl: {what}: 2 of 2 workers do not answer: [pp0 dp0 cp0 tp0 a.host], [pp0 dp0 cp0 tp1 a.host]. "
    "Silent: the process of [pp0 dp0 cp0 "
    "tp1 a.host] is stopped by a signal (SIGSTOP or SIGTSTP). Fix: see who\n--- [pp0 dp0 cp0 tp0 a.host] "
    "---\n"
)


@pytest.mark.parametrize("text", [LOST, SILENT])
@pytest.mark.parametrize(
    ("what", "who", "phase", "step", "said"),
    TABLES["a rank that is lost has to be named with its phase and step"],
)
def test_a_rank_that_is_lost_has_to_be_named_with_its_phase_and_step(
    text: str, what: str, who: int, phase: str, step: int, said: str
) -> None:
    check = promised.check_loss_is_told if text is LOST else promised.check_silence_is_told
    told = text.format(what=what)
    if not said:
        check(told, NAMES[who], phase, step, 4)
        return
    with pytest.raises(AssertionError, match=said) as caught:
        check(told, NAMES[who], phase, step, 4)
    assert not isinstance(caught.value, MissedError)
    with pytest.raises(AssertionError, match="does not say which worker"):
        check("workers were lost, and the run goes on", NAMES[who], phase, step, 4)


def test_a_phase_that_was_over_is_no_trial_of_it() -> None:
    with pytest.raises(MissedError, match="was over"):
        promised.check_loss_is_told(LOST.format(what="save, step 3, of lm_policy"), NAMES[1], "train", 3, 4)


def test_an_engine_that_dies_while_it_samples_beside_training_has_to_be_named() -> None:
    why = "engines were lost while they sampled during training, and the weights that they had are gone: "
    died = f"[{NAMES[0]} h] worker process died during generate, step 2, of generation: The actor died"
    promised.check_engine_is_told(f"megarl: {why}{died}")
    promised.check_engine_is_told(f"megarl: {died}")
    with pytest.raises(AssertionError, match="names"):
        promised.check_engine_is_told(f"megarl: {why}{died}".replace(NAMES[0], NAMES[1]))
    with pytest.raises(AssertionError, match="does not say that an engine died"):
        promised.check_engine_is_told(f"megarl: {why}they are gone")


def test_of_several_stopped_ranks_none_is_the_silent_one() -> None:
    said = SILENT.format(what="train, step 3, of lm_policy").replace(
        "Silent: ", f"Silent: the process of [{NAMES[0]} h] is stopped by a signal; "
    )
    with pytest.raises(AssertionError, match="stood still, and it says"):
        promised.check_silence_is_told(said, NAMES[1], "train", 3, 4)


NO_MEMORY = (
    "megarl: [pp0 dp0 cp0 tp1 host] out of memory in a training pass, at micro-batch 1 of 2: 4 rows, 61 "
    "tokens in 64 positions; peak 0.00 "
    "GiB, limit 62.79 GiB (OutOfMemoryError: CUDA out of memory). No weight was changed by it. Fix: a "
    "smaller policy.train_micro_batch_size"
)


def test_out_of_memory_has_to_be_told_with_all_sizes() -> None:
    promised.check_memory_is_told(NO_MEMORY, NAMES[1])
    with pytest.raises(AssertionError, match="and it names"):
        promised.check_memory_is_told(NO_MEMORY, NAMES[0])
    for part in (
        "micro-batch 1 of 2: ",
        "4 rows, ",
        "61 tokens in ",
        "64 positions; ",
        "peak 0.00 GiB, ",
        "limit 62.79 GiB ",
    ):
        with pytest.raises(AssertionError, match="does not say the sizes"):
            promised.check_memory_is_told(NO_MEMORY.replace(part, ""), NAMES[1])


NOT_FINITE = (
    "megarl: [pp0 dp0 cp0 tp0 host] {batch}. No weight was changed by it. policy.on_nonfinite = 'raise'. "
    "Fix: look\n"
    "Also failed: [pp0 dp0 cp0 tp1 host]\n--- traceback of the worker ---\n"
)


def test_what_is_not_finite_has_to_be_told_and_to_end_all_ranks() -> None:
    seen = (NonFiniteMicroBatch(1, NAMES[1], 0, 1, (4, 8), "loss"),)
    said = NOT_FINITE.format(batch=SkippedBatch(0, math.nan, math.inf, seen))
    promised.check_not_finite_is_told(said, NAMES)
    promised.check_not_finite_is_told(NOT_FINITE.format(batch=SkippedBatch(0, 1.5, math.inf, ())), NAMES)
    for wrong, match in (
        ("one of them is not finite", "does not say what"),
        (NOT_FINITE.format(batch=SkippedBatch(0, 1.5, 0.5, ())), "is finite"),
        (said.replace("\nAlso failed: [pp0 dp0 cp0 tp1 host]", ""), "has not ended on"),
        (said.replace("No weight was changed by it", "Weights were changed"), "does not say what"),
    ):
        with pytest.raises(AssertionError, match=match):
            promised.check_not_finite_is_told(wrong, NAMES)


WARNED = (
    "x WARNING the checkpoint of step {step} could not be written: [pp0] {why}\n--- traceback "
    "---\n{why}; step_1. Training continues; 3"
)
EIO = "[Errno 5] Input/output error: 'file'"


@pytest.fixture
def spoken(tmp_path: Path) -> Iterator[Launch]:
    """A launch that lives until it is written to."""
    child = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    (tmp_path / "run").mkdir()
    (tmp_path / "output").touch()
    try:
        yield Launch(child, tmp_path / "run", tmp_path / "output", time.time(), 30.0)
    finally:
        child.kill()
        child.communicate()


@pytest.mark.parametrize(
    ("refused", "words", "leaves", "said"),
    [
        (2, WARNED.format(step=2, why=EIO), False, ""),
        (0, WARNED.format(step=2, why=EIO), False, "before its moment"),
        (2, "", False, "before its moment"),
        (2, WARNED.format(step=2, why=EIO), True, "is still there"),
    ],
)
def test_a_save_that_failed_before_is_not_the_one_that_was_to_fail(
    refused: int, words: str, leaves: bool, said: str, spoken: Launch, tmp_path: Path
) -> None:
    """The launch has warned of another save, of the same reason, before the fault."""
    with Footprint() as footprint:
        subject = Subject("made up", tmp_path / "output")
        whole = Whole(tmp_path, 4, 1, 2, NAMES, 1.0, 1)
        trial = Trial(
            Trials(subject, tmp_path / "work"), whole, spoken.run_dir, footprint, Launches(), Told(), True, ()
        )
        spoken.output_file.write_text(WARNED.format(step=1, why=EIO))
        trial._mark(spoken, [1, 2])
        trial._cause(spoken, Fault("eio", 2, rank=1, on=WRITE), [1, 2])
        with spoken.output_file.open("a") as stream:
            stream.write(words)
        if refused:
            (footprint.orders / "refused-eio-1").write_bytes(b"." * refused)
        if leaves:
            (spoken.run_dir / "checkpoints" / "tmp_step_2").mkdir(parents=True)
        if not said:
            trial._await_recovery(spoken, Fault("eio", 2, rank=1, on=WRITE))
            assert list(footprint.orders.iterdir()) == [], "the rest of the order was taken back"
            return
        assert spoken.process.stdin is not None
        spoken.process.stdin.close()
        spoken.process.wait()
        with pytest.raises(AssertionError, match=said):
            trial._await_recovery(spoken, Fault("eio", 2, rank=1, on=WRITE))


def test_a_save_that_is_to_fail_comes_too_late_for_the_last_step(spoken: Launch, tmp_path: Path) -> None:
    with Footprint() as footprint:
        subject = Subject("made up", tmp_path / "output")
        whole = Whole(tmp_path, 4, 1, 2, NAMES, 1.0, 1)
        trial = Trial(
            Trials(subject, tmp_path / "work"), whole, spoken.run_dir, footprint, Launches(), Told(), True, ()
        )
        (spoken.run_dir / "metrics.jsonl").write_text('{"step": 3}\n')
        with pytest.raises(MissedError):
            trial._cause(spoken, Fault("eio", 3, rank=1, on=WRITE), [1, 2])
        assert list(footprint.orders.iterdir()) == []


@pytest.mark.parametrize(
    ("deadline_s", "took_s", "said"),
    [(10.0, 59.0, ""), (10.0, 61.0, "after 61.0 s, at a deadline"), (None, 1e6, "")],
)
def test_a_lost_rank_has_to_be_found_within_some_deadlines(
    deadline_s: float | None, took_s: float, said: str, spoken: Launch, tmp_path: Path
) -> None:
    with Footprint() as footprint:
        subject = Subject("made up", tmp_path / "output")
        whole = Whole(tmp_path, 4, 1, 2, NAMES, 1.0, 1)
        trial = Trial(
            Trials(subject, tmp_path / "work"), whole, spoken.run_dir, footprint, Launches(), Told(), True, ()
        )
        trial.deadline_s, trial.begun, trial.step = deadline_s, 1000.0, 3
        spoken.output_file.write_text(SILENT.format(what="train, step 3, of lm_policy"))
        fault = Fault("hang", 3, "train", 1)
        if not said:
            trial._check_loss(spoken, fault, 1000.0 + took_s)
            return
        with pytest.raises(AssertionError, match=said):
            trial._check_loss(spoken, fault, 1000.0 + took_s)
