"""Code in a checkpoint is refused by name and not run, in whichever of its files it stands."""

from __future__ import annotations

import dataclasses
import io
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata

from megarl.parity.pool import WorkerPool
from tests.dist import payload_jobs as jobs
from tests.dist.batches import make_batch
from tests.dist.dtensor_jobs import dtensor_config
from tests.dist.fsdp1_jobs import fsdp1_config
from tests.models import policy_config
from tests.tiers import newest_megatron, sampled

CONFIGS: dict[str, Callable[..., dict[str, Any]]] = {
    "megatron": lambda model: policy_config(model, tp=2),
    "dtensor": dtensor_config,
    "fsdp1": fsdp1_config,
}


class Payload:
    """Leaves a file when it is unpickled by something that runs what it names."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.marker),)


def of_torch(payload: Payload) -> bytes:
    file = io.BytesIO()
    torch.save({"state": payload}, file)
    return file.getvalue()


def put_among_the_tensors(directory: Path, payload: Payload) -> bool:
    """Put it where an object of the checkpoint stands; False where there is none."""
    index: Metadata = pickle.loads((directory / ".metadata").read_bytes())
    objects = [key for key in index.storage_data if not hasattr(index.state_dict_metadata[key.fqn], "chunks")]
    for key in objects:
        place: _StorageInfo = index.storage_data[key]
        file, content = directory / place.relative_path, of_torch(payload)
        end = file.stat().st_size
        with file.open("ab") as writer:
            writer.write(content)
        index.storage_data[key] = dataclasses.replace(place, offset=end, length=len(content))
    (directory / ".metadata").write_bytes(pickle.dumps(index))
    return bool(objects)


@sampled(1)
@newest_megatron(backend=["megatron"])
@pytest.mark.parametrize("backend", CONFIGS)
def test_code_in_a_checkpoint_is_not_run(
    pool: WorkerPool, tiny_models: dict[str, Path], tmp_path: Path, backend: str
) -> None:
    """Nor is a pickle read, by anybody who could run code, where a checkpoint is whole: a step, a save and a
    load are watched."""
    config = CONFIGS[backend](tiny_models["qwen3"])
    whole, ran = tmp_path / "whole", tmp_path / "ran"
    for found in pool.run(2, jobs.pickles_of_a_resume, config, make_batch(8, 11, seed=1), str(whole)):
        assert not found, "\n".join(found)[:20_000]
    payload = Payload(ran)
    poisoned: dict[str, Path] = {}

    def copy(name: str) -> Path:
        poisoned[name] = tmp_path / name
        shutil.copytree(whole, poisoned[name])
        return poisoned[name]

    for part in ("weights", "optimizer"):
        for file in sorted(path for path in (whole / part).rglob("*") if path.is_file()):
            inside = file.relative_to(whole)
            if file.name == ".metadata":
                (copy(f"{part}-index") / inside).write_bytes(pickle.dumps(payload))
            elif file.suffix in {".pt", ".pth"}:
                (copy(f"{part}-{file.stem}") / inside).write_bytes(of_torch(payload))
        if (whole / part / ".metadata").exists() and not put_among_the_tensors(
            copy(f"{part}-object") / part, payload
        ):
            shutil.rmtree(poisoned.pop(f"{part}-object"))
    assert {"weights-index", "optimizer-index"} <= set(poisoned)
    for told in pool.run(2, jobs.load, config, [*map(str, poisoned.values()), str(whole)]):
        assert told[-1] == ("", 0, "")
        for name, (kind, exit_code, text) in zip(poisoned, told, strict=False):
            assert (kind, exit_code) == ("UnusableCheckpointError", 2), f"{name}: {kind} {text}"
            assert "mkdir" in text and "trust" in text, f"{name}: {text}"
    assert not ran.exists()
    assert backend != "megatron" or "weights-object" in poisoned
