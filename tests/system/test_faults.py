"""Faults in whole runs by the harness (``tests/faults``): one of each kind on a tiny run, whose end has to be
that of an undisturbed one.

Random ones, on three backends, are a soak: ``python -m tests.faults --soak 200 --work runs/soak``.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.fault import parse
from tests.faults.tiny import subjects_of
from tests.faults.trial import Trials, can_mount
from tests.tiers import slow

pytestmark = [slow, pytest.mark.timeout(1800)]
NEEDS_MOUNT = pytest.mark.skipif(not can_mount(), reason="mounts are not allowed")


@pytest.fixture(scope="module")
def trials(tmp_path_factory: pytest.TempPathFactory) -> Trials:
    work = tmp_path_factory.mktemp("faults")
    [subject] = subjects_of(["megatron"], work)
    return Trials(subject, work)


@pytest.mark.parametrize(
    "faults",
    [
        "kill:rank=1,phase=train,step=2 kill:rank=0,phase=save,step=3",
        "kill:rank=0,phase=init kill:rank=driver,step=3",
        "hang:rank=1,phase=generate,step=2",
        "stuck:rank=0,step=2",
        "slow:rank=0,step=2,seconds=3",
        "nan:rank=1,step=2",
        "oom:rank=0,step=2",
        "eio:rank=1,on=write,step=2",
        "eio:on=read,count=2,step=3",
        "eio:on=read,count=99,step=3",
        "term:step=2",
        "gcs:step=2",
        "node:step=2",
        "stop:of=raylet,step=2",
        "stop:of=gcs,step=1",
        pytest.param("disk_full:step=2", marks=NEEDS_MOUNT),
    ],
)
def test_a_run_with_faults_ends_like_an_undisturbed_one(faults: str, trials: Trials) -> None:
    name = "".join(letter if letter.isalnum() else "-" for letter in faults)
    told = trials.run(name, [parse(each) for each in faults.split()], within=True)
    print("; ".join(told.words))


@pytest.mark.parametrize("place", [0, 1], ids=["in_order", "ready_first"])
def test_engines_and_reward_processes_are_lost_beside_training(place: int, tmp_path: Path) -> None:
    faults = ("rewards:step=2", "engine:step=3", "kill:rank=driver,step=5", "kill:rank=1,step=6")
    subject = subjects_of(["megatron"], tmp_path, beside=True)[place]
    told = Trials(subject, tmp_path).run("run", [parse(each) for each in faults], within=True)
    print("; ".join(told.words))
