"""A whole run with vLLM's engines reads no pickle but what Ray carries, and what vLLM's processes send one another."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from megarl import env
from tests.system.test_vllm_restarts import config_of
from tests.system.vllm_engines import dense_model
from tests.system.whole_runs import ROOT
from tests.tiers import slow
from tests.unpickling.watch import PickleWatch

pytestmark = [
    slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]


@pytest.mark.parametrize("shared", [True, False], ids=["colocated", "apart"])
def test_a_run_with_engines_reads_no_pickle_from_files_or_foreign_sockets(tmp_path: Path, shared: bool) -> None:
    model = dense_model(tmp_path / "model", intermediate_size=112, num_hidden_layers=2, initializer_range=0.2)
    config = config_of(tmp_path / "whole" / "run", model, shared)
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config))
    watch = PickleWatch(tmp_path / "pickles")
    watch.directory.mkdir()
    variables = {name: value for name, value in env.snapshot().items() if not name.startswith("RAY_")}
    done = subprocess.run(
        [sys.executable, "-m", "megarl.cli", "train", str(tmp_path / "run.yaml")],
        cwd=ROOT,
        env={**variables, **watch.variables, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-5000:]
    assert sum("default_worker.py" in words for words in watch.watched()) >= 2, "policy and engine"
    found = watch.found()
    assert not found, "\n".join(found)[:20_000]
