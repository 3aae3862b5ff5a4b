"""A checkpoint that one rank alone cannot write: all ranks learn of it, nothing is left behind, and they can go on."""

from __future__ import annotations

import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from megarl.checkpoint.collective import appears_whole, failing_together
from tests.dist import dtensor_jobs, jobs
from tests.dist.dtensor_jobs import dtensor_config
from tests.dist.pool import WorkerPool
from tests.models import policy_config
from tests.tiers import sampled


def outcome_of(error: BaseException | None) -> tuple[str, str]:
    return ("no error", "") if error is None else (type(error).__name__, str(error))


def write_alone(directory: str, failing: int) -> list[Any]:
    """Every rank writes a file; rank ``failing`` cannot. Then all of them write again. What happened, and what is there afterwards."""
    outcomes: list[Any] = []
    for attempt in range(2):
        error: BaseException | None = None
        try:
            with appears_whole(Path(directory)) as staging, failing_together("writing"):
                (staging / f"{dist.get_rank()}").write_text("here")
                if attempt == 0 and dist.get_rank() == failing:
                    (staging / "no" / "such").write_text("x")
        except Exception as caught:
            error = caught
        outcomes.append(outcome_of(error))
        dist.barrier()
        outcomes.append(sorted(path.name for path in Path(directory).parent.rglob("*")))
        dist.barrier()
    return outcomes


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_a_rank_that_fails_alone_fails_all(pool: WorkerPool, tmp_path: Path, failing: int) -> None:
    for (kind, message), after, again, files in pool.run(3, write_alone, str(tmp_path / "it"), failing):
        assert kind == "CheckpointError" and message.startswith(f"rank {failing}: writing failed: FileNotFoundError")
        assert after == []
        assert again[0] == "no error" and files == ["0", "1", "2", "it"]


@contextmanager
def small_files_only(limit: int) -> Iterator[None]:
    """Writing beyond so many bytes into any file fails, as on a full disk; also in processes that start meanwhile."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def save_on_a_full_disk(kind: str, config: dict[str, Any], directory: str, failing: int, limit: int) -> list[Any]:
    """A worker's checkpoint that rank ``failing`` has no room for, and a second one with room."""
    worker = (jobs if kind == "megatron" else dtensor_jobs).build(config, init_reference_model=False)
    outcomes: list[Any] = []
    for room in (False, True):
        root = Path(directory) / str(room)
        error: BaseException | None = None
        try:
            if room or dist.get_rank() != failing:
                worker.save_checkpoint(str(root / "weights"), str(root / "optimizer"))
            else:
                with small_files_only(limit):
                    worker.save_checkpoint(str(root / "weights"), str(root / "optimizer"))
        except Exception as caught:
            error = caught
        outcomes.append(outcome_of(error))
        dist.barrier()
        outcomes.append(sorted(path.name for path in root.iterdir()))
    worker.backend.close()
    return outcomes


# Megarl's own files hold some 5 kB a rank, the parts of weights and optimizer state more
@sampled(2)
@pytest.mark.parametrize("limit", [100, 12_000], ids=["nothing fits", "small files fit"])
# on rank 0 Megatron writes alone what all ranks share, and its other ranks go on without asking
@pytest.mark.parametrize(("kind", "failing"), [("megatron", 1), ("dtensor", 0), ("dtensor", 1)])
def test_a_full_disk_of_one_rank(
    pool: WorkerPool, tiny_models: dict[str, Path], tmp_path: Path, kind: str, failing: int, limit: int
) -> None:
    config = policy_config(tiny_models["qwen2"], tp=2) if kind == "megatron" else dtensor_config(tiny_models["qwen2"])
    for (name, message), after, again, files in pool.run(2, save_on_a_full_disk, kind, config, str(tmp_path), failing, limit):
        assert name == "CheckpointError" and "weights" in message, message
        assert after == []
        assert again[0] == "no error" and files == ["optimizer", "weights"]
