"""Read an optimizer's float32 master weights, instead of the model's rounded weights."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import torch

from converters.errors import ConversionError
from converters.foreign.view import RenamedTensors, ViewedTensors
from converters.torch_dist.location import is_checkpoint
from converters.torch_dist.reader import StoredTensors, TorchDistCheckpoint

# Key in the format fully_reshardable: "param". In fully_sharded_model_space, and for an optimizer that is not
# distributed: "fp32_param".
_MASTER = re.compile(r"(?:chained_\d+\.)?optimizer\.state\.(?:fp32_param|param)\.(.+)")
_BUCKETS = re.compile(r"(?:chained_\d+\.)?optimizer\.distributed\.dp_group_idx_\d+\.")
_OPTIMIZER_DIRECTORY = "optimizer"


class MasterTensors(ViewedTensors):
    """A checkpoint whose parameters are replaced by the optimizer's master weights.

    Args:
        model: tensors of the model.
        master: tensors of the optimizer, by the model's keys.

    Raises:
        ConversionError: master weights are missing, or have another shape than the model's weights.
    """

    def __init__(self, model: StoredTensors, master: StoredTensors) -> None:
        super().__init__(model)
        self._master = master
        problems = []
        for key in self:
            if key not in master:
                # Parameters that are float32 themselves have no master weights.
                if model.dtype(key) != torch.float32:
                    problems.append(f"missing: {key} ({model.dtype(key)} in the model)")
            elif master.dtype(key) != torch.float32 or master.shape(key) != model.shape(key):
                problems.append(
                    f"{key} is {model.dtype(key)} {list(model.shape(key))}, its float32 weights are "
                    f"{master.dtype(key)} "
                    f"{list(master.shape(key))}"
                )
        if problems:
            raise ConversionError(
                f"the optimizer state of {model.directory} does not hold the float32 weights of the model "
                "in its own shapes",
                "save with distrib_optim_sharding_type fully_reshardable (Megatron-LM: "
                "--dist-ckpt-optim-fully-reshardable), or leave "
                "--source-weights master out",
                problems,
            )

    def _stored(self, key: str) -> tuple[StoredTensors, str]:
        return self._master if key in self._master else self._tensors, key

    def __iter__(self) -> Iterator[str]:
        # Skip the optimizer state, with or without the number of a chained optimizer.
        return iter(key for key in self._tensors if "optimizer." not in key)


def optimizer_beside(directory: Path) -> list[Path]:
    """Return the optimizer's checkpoint next to the weights, as a list; empty if there is none."""
    beside = directory.parent / _OPTIMIZER_DIRECTORY
    return [beside] if is_checkpoint(beside) else []


def with_master_weights(checkpoint: TorchDistCheckpoint) -> MasterTensors:
    """Return a checkpoint with the master weights of its optimizer. The optimizer state is in the checkpoint,
    or in the directory ``optimizer`` next to it.

    Raises:
        ConversionError: there is no optimizer state, or only its own ranks can read its format.
    """
    places = [checkpoint, *map(TorchDistCheckpoint, optimizer_beside(checkpoint.directory))]
    for place in places:
        names = {}
        for key in place:
            match = _MASTER.fullmatch(key)
            if match is not None:
                names[match.group(1)] = key
        if names:
            return MasterTensors(checkpoint, RenamedTensors(place, names))
    readable = "readable are fully_reshardable and, not flattened, fully_sharded_model_space"
    for place in places:
        if any(map(_BUCKETS.match, (*place, *place.objects))):
            raise ConversionError(
                f"the optimizer of {checkpoint.directory} was saved by buckets (dp_reshardable or "
                f"dp_zero_gather_scatter); {readable}",
                "save it again with --dist-ckpt-optim-fully-reshardable, or leave --source-weights master "
                "out",
            )
    raise ConversionError(
        f"{checkpoint.directory} has no optimizer state with float32 weights; {readable}",
        "leave --source-weights master out",
    )
