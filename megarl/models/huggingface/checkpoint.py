"""Checkpoints of the torch backends through torch.distributed.checkpoint (DCP), readable with any number of
ranks.

A state maps Hugging Face parameter names to tensors; sharded ones are DTensors. Both torch backends write the
same names and shapes, so each can read the other's checkpoints.

No file is unpickled without restrictions. DCP's index ``.metadata`` is a pickle, for which only a few classes
are allowed. Other files are read with ``torch.load(weights_only=True)``, random-number states from
safetensors.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypedDict

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.optim.optimizer import StateDict

from megarl.checkpoint.collective import (
    appears_whole,
    failing_alike,
    failing_together,
    restore_random_state,
    write_random_state,
)
from megarl.checkpoint.restricted import METADATA_FILE, read_plain, read_plain_index, restricted_loading
from megarl.checkpoint.staging import RankWriter, StagingBuffer
from megarl.checkpoint.storage import is_file
from megarl.distributed.device import DeviceRuntime
from megarl.errors import CheckpointError, StorageError
from megarl.models.engine.low_precision_adam import LowPrecisionAdamW
from megarl.models.huggingface.optimizer import KERNEL_ARGUMENTS, OPEN_KERNEL, SavedSchedule

PLAIN_FILE = "optimizer.pt"
# Keys that select the kernel of a step. The configuration decides them; if it leaves the kernel open, the
# checkpoint does.
IMPLEMENTATION = frozenset({*KERNEL_ARGUMENTS, OPEN_KERNEL})


class OptimizerState(TypedDict):
    """Optimizer state by parameter name. ``state`` has tensors and numbers of each parameter;
    ``param_groups`` has the hyperparameters and ``params``, a list of parameter names."""

    state: dict[str, StateDict]
    param_groups: list[StateDict]


def save_weights(
    state: Mapping[str, torch.Tensor],
    directory: Path,
    buffer: StagingBuffer | None = None,
    add: Callable[[Path], None] | None = None,
) -> None:
    """Write the weights to ``directory``, or stage them. Collective over all ranks. ``add`` writes further
    files on rank 0.

    Raises:
        CheckpointError: ``directory`` is not empty or cannot be written.
    """
    with appears_whole(directory) as partial:
        _write(state, partial, buffer)
        if add is not None:
            with failing_together(f"writing the base of the adapters to {directory}"):
                if dist.get_rank() == 0:
                    add(partial)


def load_weights(state: Mapping[str, torch.Tensor], directory: Path) -> None:
    """Load the weights that ``save_weights`` wrote into the tensors of ``state``. Collective over all
    ranks.

    Raises:
        CheckpointError: there is no such checkpoint, or it is of another model.
    """
    _read(state, directory, "weights")


def save_optimizer(
    state: OptimizerState,
    schedule: SavedSchedule,
    runtime: DeviceRuntime,
    directory: Path,
    buffer: StagingBuffer | None = None,
) -> None:
    """Write optimizer state, schedule and every rank's random-number state to ``directory``. Tensors may be
    staged. Collective over all ranks.

    Raises:
        CheckpointError: ``directory`` is not empty or cannot be written.
    """
    # Write tensors through DCP, so that any layout can read them, and numbers and texts in one file by rank
    # 0.
    tensors: dict[str, torch.Tensor] = {}
    numbers: dict[str, object] = {}
    for name, values in state["state"].items():
        for key, value in values.items():
            (tensors if isinstance(value, torch.Tensor) else numbers)[f"{name}/{key}"] = value
    groups = []
    for group in state["param_groups"]:
        groups.append({key: _plain(value) for key, value in group.items()})
    plain = {"numbers": numbers, "param_groups": groups, "schedule": dict(schedule)}
    with appears_whole(directory) as partial:
        _write(tensors, partial, buffer)
        with failing_together(f"writing schedule and random-number states to {directory}"):
            if dist.get_rank() == 0:
                torch.save(plain, partial / PLAIN_FILE)
            write_random_state(partial, runtime)


def load_optimizer(
    like: Mapping[str, torch.Tensor], runtime: DeviceRuntime, directory: Path
) -> tuple[OptimizerState, SavedSchedule]:
    """Read what ``save_optimizer`` wrote: return optimizer state and schedule, and restore random-number
    states. Collective over all ranks.

    Hyperparameters come from the checkpoint, so that a run continues unchanged; for the learning rate see
    ``resume_schedule``. A rank's random-number state is restored if the saving run had a rank of that number.

    Args:
        like: the weights; optimizer state with a weight's shape is sharded like the weight.
        runtime: device of this process.
        directory: directory of the checkpoint.

    Raises:
        CheckpointError: there is no such checkpoint, or it is of another model.
    """
    with failing_alike():
        metadata = _metadata(directory)
        plain = read_plain(directory / PLAIN_FILE)
    state: dict[str, StateDict] = {}
    tensors = {}
    for entry, stored in metadata.state_dict_metadata.items():
        name, key = entry.rsplit("/", 1)
        if name not in like or not isinstance(stored, TensorStorageMetadata):
            raise CheckpointError(
                f"{directory} does not hold the optimizer state of this model: {entry} is unknown. Check "
                "model_name and the path"
            )
        tensors[entry] = state.setdefault(name, {})[key] = _empty(stored, like[name])
    _read(tensors, directory, "optimizer state")
    for entry, value in plain["numbers"].items():
        name, key = entry.rsplit("/", 1)
        state.setdefault(name, {})[key] = value
    with failing_together(f"reading random-number states of {directory}"):
        restore_random_state(directory, runtime)
    schedule: SavedSchedule = plain["schedule"]
    if not schedule:
        # Version 0.1 stored nothing for a run without a schedule, so that the optimizer's updates are used as
        # the schedule's steps.
        updates = max((int(values["step"]) for values in state.values() if "step" in values), default=0)
        schedule = {"kind": None, "state": {"last_epoch": updates}}
    return {"state": state, "param_groups": plain["param_groups"]}, schedule


def named_optimizer_state(
    optimizer: torch.optim.Optimizer, named_parameters: Iterable[tuple[str, torch.nn.Parameter]]
) -> OptimizerState:
    """Return an optimizer's state by parameter name. Its parameters must be full tensors or DTensors."""
    names = names_of(named_parameters)
    state = optimizer.full_state() if isinstance(optimizer, LowPrecisionAdamW) else optimizer.state
    return {
        "state": {names[parameter]: dict(values) for parameter, values in state.items()},
        "param_groups": named_groups(optimizer, names),
    }


def names_of(named_parameters: Iterable[tuple[str, torch.nn.Parameter]]) -> dict[torch.Tensor, str]:
    """Return the name of each parameter by the parameter."""
    return {parameter: name for name, parameter in named_parameters}


def named_groups(optimizer: torch.optim.Optimizer, names: Mapping[torch.Tensor, str]) -> list[StateDict]:
    """Return the parameter groups of an optimizer with names instead of parameters."""
    return [
        {**group, "params": list(map(names.__getitem__, group["params"]))} for group in optimizer.param_groups
    ]


def install_optimizer_state(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.nn.Parameter]],
    loaded: OptimizerState,
) -> None:
    """Load the result of ``named_optimizer_state`` into an optimizer.

    Raises:
        CheckpointError: the state belongs to an optimizer with other parameters.
    """
    names = names_of(named_parameters)
    order: list[str] = []
    for group in named_groups(optimizer, names):
        order += group["params"]
    state = {index: loaded["state"][name] for index, name in enumerate(order) if name in loaded["state"]}
    install(optimizer, state, loaded, names)


def install(
    optimizer: torch.optim.Optimizer,
    state: Mapping[int, Any],
    loaded: OptimizerState,
    names: Mapping[torch.Tensor, str],
) -> None:
    """Load state and hyperparameters into an optimizer.

    If the configuration selects no kernel, the one that wrote the checkpoint is used, so that the run
    continues bit for bit; for checkpoints of version 0.1 that is the plain kernel.

    Args:
        optimizer: the optimizer.
        state: state by index of the parameter in the optimizer.
        loaded: supplies hyperparameters and parameter names.
        names: names of the optimizer's parameters.

    Raises:
        CheckpointError: ``loaded`` belongs to an optimizer with other parameters.
    """
    here = [group["params"] for group in named_groups(optimizer, names)]
    there = [list(group["params"]) for group in loaded["param_groups"]]
    # Compare names in order: torch assigns state by index and would give it to other parameters.
    if here != there:
        raise CheckpointError(
            f"the optimizer checkpoint is for groups of {list(map(len, there))} "
            f"parameters, this optimizer has groups of {list(map(len, here))}, or other "
            "parameters; check model_name and policy.optimizer"
        )
    groups, first = [], 0
    for live, saved in zip(optimizer.param_groups, loaded["param_groups"], strict=True):
        decides = {OPEN_KERNEL} if live.get(OPEN_KERNEL) else IMPLEMENTATION
        kept = {key: value for key, value in live.items() if key in decides}
        last = first + len(live["params"])
        groups.append({**saved, **kept, "params": list(range(first, last))})
        first = last
    optimizer.load_state_dict({"state": dict(state), "param_groups": groups})


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, torch.Tensor) else value


def _empty(stored: TensorStorageMetadata, like: torch.Tensor) -> torch.Tensor:
    if tuple(stored.size) == tuple(like.shape):
        # Shard it like the weight, so that DCP reads only this rank's shard. A scalar state stays whole.
        return torch.zeros_like(like, dtype=stored.properties.dtype)
    return torch.zeros(stored.size, dtype=stored.properties.dtype)


def _write(state: Mapping[str, torch.Tensor], directory: Path, buffer: StagingBuffer | None = None) -> None:
    try:
        with warnings.catch_warnings(action="ignore"):  # DCP warns of its own future deprecations.
            dcp.save(dict(state), storage_writer=RankWriter(directory, buffer))
    except CheckpointException as error:  # DCP raises it on all ranks, and it is not an Exception.
        raise CheckpointError(
            f"{directory} cannot be written: {error}. Check free space and permissions there"
        ) from error


def _read(state: Mapping[str, torch.Tensor], directory: Path, what: str) -> None:
    with failing_alike():
        stored = _metadata(directory).state_dict_metadata
    # Compare names here: DCP ignores tensors that are only in the checkpoint, and would load part of another
    # model.
    only_there, only_here = sorted(stored.keys() - state.keys()), sorted(state.keys() - stored.keys())
    other = sorted(name for name in state.keys() & stored.keys() if not _fits(stored[name], state[name]))
    if only_there or only_here or other:
        raise CheckpointError(
            f"{directory} does not hold the {what} of this model: only in the checkpoint {only_there[:3]}, "
            "only in the model "
            f"{only_here[:3]}, of another shape {other[:3]} ({len(only_there)}, {len(only_here)} and "
            f"{len(other)} in all). "
            "Check model_name and the path"
        )
    try:
        with warnings.catch_warnings(action="ignore"), restricted_loading():
            dcp.load(dict(state), checkpoint_id=directory)
    except CheckpointException as error:
        for cause, _ in error.failures.values():
            if isinstance(cause, StorageError):
                raise cause from error
        raise CheckpointError(
            f"{directory} cannot be read: {error}. It is damaged; use another checkpoint"
        ) from error


def _fits(stored: Any, here: torch.Tensor) -> bool:
    return isinstance(stored, TensorStorageMetadata) and tuple(stored.size) == tuple(here.shape)


def require(directory: Path) -> None:
    """Check that the path is a complete DCP directory. Local.

    Raises:
        CheckpointError: it is not.
        StorageError: the storage cannot be read.
    """
    if not is_file(directory / METADATA_FILE):
        raise CheckpointError(
            f"{directory} is not a checkpoint (no {METADATA_FILE} there): give the directory that "
            "save_checkpoint was given"
        )


def _metadata(directory: Path) -> Metadata:
    require(directory)
    return read_plain_index(directory)
