"""A whole run with vLLM's engines reads no pickle but what Ray carries and what vLLM's processes send one
another.

What torch.compile has kept in a directory of the user's alone it would read as well: that one is new here.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from megarl import env
from tests.system.test_resume import on_one_rank
from tests.system.whole_runs import CONFIGS, ROOT, make_material, write_config
from tests.tiers import slow
from tests.unpickling.watch import PickleWatch

pytestmark = [
    slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]


@pytest.mark.parametrize("layer", ["vllm", "vllm-apart"])
def test_a_run_with_engines_reads_no_pickle_from_files_or_foreign_sockets(tmp_path: Path, layer: str) -> None:
    config = on_one_rank(write_config(tmp_path / "run.yaml", "grpo", make_material(tmp_path, teach=False)))
    watch = PickleWatch(tmp_path / "pickles")
    watch.directory.mkdir()
    variables = {name: value for name, value in env.snapshot().items() if not name.startswith("RAY_")}
    changes = [
        f"run_dir={tmp_path / 'run'}",
        f"cluster.gpus_per_node={1 if layer == 'vllm' else 2}",
        "grpo.max_num_steps=2",
    ]
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "megarl.cli",
            "train",
            str(config),
            "--with",
            str(CONFIGS / f"{layer}.yaml"),
            *changes,
        ],
        cwd=ROOT,
        env={
            **variables,
            **watch.variables,
            "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "compiled"),
            "OMP_NUM_THREADS": "1",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-5000:]
    assert sum("default_worker.py" in words for words in watch.watched()) >= 2, "policy and engine"
    found = watch.found()
    assert not found, "\n".join(found)[:20_000]
