"""Conversions as processes of their own: killed at random points and started again, and within a bound on memory."""

from __future__ import annotations

import contextlib
import hashlib
import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.conversion import save_llama

SIZE = 60_000_000
CAP_MIB = 640


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models") / "hf"
    save_llama(directory, SIZE)
    return directory


def start(*argv: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "converters", *argv, "--json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def done(process: subprocess.Popen[str]) -> dict[str, object]:
    out, error = process.communicate(timeout=300)
    assert process.returncode == 0, error
    result: dict[str, object] = json.loads(out)
    return result


def written(directory: Path) -> int:
    return sum(path.stat().st_blocks * 512 for path in directory.rglob("*") if path.is_file()) if directory.is_dir() else 0


def fingerprint(directory: Path) -> dict[str, str]:
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    return {path.relative_to(directory).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def test_killed_at_random_points_and_run_again(source: Path, tmp_path: Path) -> None:
    seed = random.randrange(10**6)
    print(f"seed {seed}")
    generator = random.Random(seed)
    done(start("import", str(source), str(tmp_path / "mcore")))
    done(start("export", str(tmp_path / "mcore"), str(tmp_path / "back"), "--max-shard-size", "50MB"))
    for action, origin, expected, options in (
        ("import", source, tmp_path / "mcore", []),
        ("export", tmp_path / "mcore", tmp_path / "back", ["--max-shard-size", "50MB"]),
    ):
        target = tmp_path / f"{action}-again"
        killed = 0
        for _ in range(2):
            process = start(action, str(origin), str(target), *options)
            goal = generator.uniform(0.05, 0.9) * SIZE
            while written(tmp_path / f".{target.name}.partial") < goal and process.poll() is None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(timeout=0.002)
            process.kill()
            process.communicate()
            killed += process.returncode < 0
            if target.exists():
                break
        assert killed, "no run was killed before it ended"
        if not target.exists():
            done(start(action, str(origin), str(target), *options))
        assert fingerprint(target) == fingerprint(expected)
        assert not (tmp_path / f".{target.name}.partial").exists()


@pytest.mark.parametrize("action", ["import", "export"])
def test_memory_stays_within_its_bound(action: str, source: Path, tmp_path: Path) -> None:
    """Fewer workers run, and what the process reports at its end is within the bound."""
    origin = source
    if action == "export":
        origin = tmp_path / "mcore"
        done(start("import", str(source), str(origin)))
    unbounded = done(start(action, str(origin), str(tmp_path / "many"), "--workers", "6"))
    bounded = done(start(action, str(origin), str(tmp_path / "few"), "--workers", "6", "--max-memory", f"{CAP_MIB}MiB"))
    assert int(str(bounded["workers"])) < int(str(unbounded["workers"])) == 6
    assert int(str(bounded["peak_memory"])) <= CAP_MIB * 2**20
