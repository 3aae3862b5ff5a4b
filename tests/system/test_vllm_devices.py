"""An engine of several ranks has the GPUs of its own places: Ray's own account of GPUs, on a machine that
need not have one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from megarl import env
from tests.tiers import slow

ROOT = Path(__file__).parents[2]


@slow
def test_engines_of_two_ranks_have_the_policy_s_gpus_beside_it_and_others_apart_from_it() -> None:
    variables = {name: value for name, value in env.snapshot().items() if not name.startswith("RAY_")}
    command = [sys.executable, "-m", "tests.system.engine_devices"]
    done = subprocess.run(
        command, cwd=ROOT, env=variables, capture_output=True, text=True, check=False, timeout=400
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    ranks = [device for [device] in found["policy"]]
    assert len(set(ranks)) == 4
    assert found["colocated"] == [ranks[:2], ranks[2:]]
    [others] = found["apart"]
    assert len(set(others)) == 2 and not set(others) & set(ranks)
    [[refusal]] = found["taken"]
    assert (
        "an engine of 2 ranks from bundle 0 on: Ray did not give it the GPUs of bundles [1] in 1 s. Fix: "
        in refusal
    )
