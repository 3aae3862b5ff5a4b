"""A step's sampled batch and its file format, which checkpoints (for waiting batches) and ledgers use."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NotRequired, TypedDict

from converters.files.hashing import hash_of
from megarl.errors import UnusableCheckpointError

if TYPE_CHECKING:
    import torch

    from megarl.data.datasets import Dataset, Example
    from megarl.distributed.batched_data_dict import BatchedDataDict
    from megarl.rollout.collector import Rollouts


@dataclass(frozen=True, slots=True)
class Sampling:
    """The batch that was sampled for a step.

    Attributes:
        rollouts: the samples to train on.
        judged: [B] columns of all responses that were scored for the step, including those that it does not
            train on.
        metrics: metrics of the sampling.
        epoch: epoch of the data after the last sample.
    """

    rollouts: Rollouts
    judged: BatchedDataDict[Any]
    metrics: Mapping[str, float]
    epoch: int = 0


DIRECTORY = "rollouts"
"""Directory of waiting batches in a checkpoint."""

GROUPS = "groups.json"
"""File in that directory with the state of the schedule `ready_first`."""

_SAMPLES, _JUDGED, _EARLIER = "samples/", "judged/", "earlier/"


def save_batches(directory: Path, batches: Mapping[int, Sampling]) -> None:
    """Write waiting batches, by number, into a checkpoint. They cannot be sampled again after a resume,
    because the weights that sampled them are gone.

    Raises:
        OSError: a file cannot be written.
    """
    place = directory / DIRECTORY
    if batches:
        place.mkdir()
    for number, batch in batches.items():
        save_batch(place, number, batch)


class _Description(TypedDict):
    """A batch without its tensors: record indices, numbers of the prompts, columns of the samples, and
    metrics. Earlier versions wrote neither prompts nor digest."""

    records: list[int]
    prompts: NotRequired[list[int]]
    columns: list[str]
    others: Mapping[str, object]
    metrics: dict[str, float]
    sampling: dict[str, float]
    epoch: int
    digest: NotRequired[str]


class Groups(TypedDict):
    """State of the schedule `ready_first`: ordinals of complete groups in completion order, and pairs of
    ordinal and record index of the others."""

    arrived: list[int]
    running: list[list[int]]


def save_batch(place: Path, number: int, batch: Sampling) -> list[Path]:
    """Write a batch: its tensors as safetensors, and everything else as JSON with a digest of the tensors.
    Return both paths.

    Raises:
        OSError: a file cannot be written.
    """
    import torch
    from safetensors.torch import save

    samples, judged = batch.rollouts.samples, batch.judged
    parts: dict[str, Mapping[str, object]] = {_SAMPLES: samples}
    # Mostly both are the same object, which is then written once and read as one object again.
    if judged is not samples:
        parts[_JUDGED] = judged
    parts[_EARLIER] = batch.rollouts.earlier or {}
    tensors = {}
    for prefix, columns in parts.items():
        for name, value in columns.items():
            if isinstance(value, torch.Tensor):
                # Clone the tensors, because safetensors refuses tensors that share memory.
                tensors[f"{prefix}{name}"] = value.clone().contiguous()
    path = _path_of(place, number)
    # safetensors's save_file would make the file private: a colleague could not replay the run.
    path.write_bytes(save(tensors))
    numbers: dict[int, int] = {}
    description: _Description = {
        "records": [record.index for record in batch.rollouts.records],
        # Rows of the same prompt share a record object, by which samples are numbered. A record that occurs
        # twice in a step is two objects.
        "prompts": [numbers.setdefault(id(record), len(numbers)) for record in batch.rollouts.records],
        "columns": list(samples),
        "others": {name: value for name, value in samples.items() if not isinstance(value, torch.Tensor)},
        "metrics": dict(batch.rollouts.metrics),
        "sampling": dict(batch.metrics),
        "epoch": batch.epoch,
        "digest": hash_of(path),
    }
    path.with_suffix(".json").write_text(json.dumps(description), encoding="utf-8")
    return [path, path.with_suffix(".json")]


def load_batches(directory: Path, data: Dataset) -> dict[int, Sampling]:
    """Read the batches that ``save_batches`` wrote, by number. Empty if there are none.

    Args:
        directory: directory of a verified checkpoint.
        data: data set from which they were sampled; its fingerprint must have been compared.

    Raises:
        UnusableCheckpointError: they cannot be read.
    """
    place = directory / DIRECTORY
    try:
        batches = {}
        for path in sorted(place.glob("step_*.safetensors")):
            number = int(path.stem.removeprefix("step_"))
            batches[number] = load_batch(place, number, data)
        return batches
    except ValueError as error:
        what = f"the batches in {place} that wait to be trained on cannot be read ({error})"
        raise UnusableCheckpointError(
            f"{what}. Fix: remove {directory} to resume from an earlier one"
        ) from error


def groups_of(directory: Path) -> Groups | None:
    """Read the groups from a checkpoint. Return None if it has none.

    Raises:
        UnusableCheckpointError: the file cannot be read.
    """
    path = directory / DIRECTORY / GROUPS
    if not path.exists():
        return None
    try:
        found: Groups = json.loads(path.read_text(encoding="utf-8"))
        return {"arrived": list(found["arrived"]), "running": list(found["running"])}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UnusableCheckpointError(
            f"{path} cannot be read ({error}). Fix: resume from an earlier checkpoint"
        ) from error


def load_batch(place: Path, number: int, data: Dataset) -> Sampling:
    """Read a batch that ``save_batch`` wrote.

    Raises:
        ValueError: a file is missing, truncated or modified.
    """
    from safetensors import SafetensorError

    path = _path_of(place, number)
    try:
        description: _Description = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
        # Batches of earlier versions have no digest.
        if description.get("digest", "") not in {"", hash_of(path)}:
            raise ValueError(f"{path} was changed after it was written")
        return _read(path, description, data)
    # A file that holds another kind of JSON has no keys to look up.
    except (OSError, LookupError, TypeError, AttributeError, RecursionError, SafetensorError) as error:
        raise ValueError(f"{path}: {type(error).__name__}: {error}") from error


def _path_of(place: Path, number: int) -> Path:
    return place / f"step_{number}.safetensors"


def _read(path: Path, description: _Description, data: Dataset) -> Sampling:
    from safetensors import safe_open

    from megarl.distributed.batched_data_dict import BatchedDataDict
    from megarl.rollout.collector import Rollouts

    with safe_open(path, "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no mapping

    def part(prefix: str) -> dict[str, torch.Tensor]:
        return {
            name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)
        }

    values, judged, earlier = {**description["others"], **part(_SAMPLES)}, part(_JUDGED), part(_EARLIER)
    samples: BatchedDataDict[Any] = BatchedDataDict({name: values[name] for name in description["columns"]})
    records = data.select(description["records"])
    prompts: dict[int, Example] = {}
    # Batches written by earlier versions do not record which rows share a prompt.
    shared = [
        prompts.setdefault(number, record)
        for number, record in zip(description.get("prompts", range(len(records))), records, strict=True)
    ]
    rollouts = Rollouts(
        samples, shared, description["metrics"], BatchedDataDict(earlier) if earlier else None
    )
    return Sampling(
        rollouts,
        BatchedDataDict(judged) if judged else samples,
        description["sampling"],
        description["epoch"],
    )
