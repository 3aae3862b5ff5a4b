"""Checkpoints through Megatron-Core's dist-checkpointing, which any layout can load whatever layout saved
them.

A checkpoint directory appears complete or not at all: everything is written next to it, synced to disk, and
then renamed by rank 0 alone.

The distributed optimizer's state goes through ``state_stream``, at the right offsets. Megatron-Core up to
0.19 concatenates the gathered buckets of a buffer without their padding, but then slices parameters by their
offsets *with* padding. With two or more buckets (large models, or tied embeddings over pipeline stages) every
parameter beyond the first bucket is saved from the wrong offset.
"""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import serialization
from megatron.core.dist_checkpointing.core import CONFIG_FNAME, CheckpointingException
from megatron.core.dist_checkpointing.strategies import common
from megatron.core.dist_checkpointing.validation import StrictHandling
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer, distrib_optimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from converters.model_config.heads import OUTPUT_LAYER
from converters.torch_dist.reader import TorchDistCheckpoint
from megarl.checkpoint.collective import (
    appears_whole,
    failing_alike,
    failing_together,
    gather_objects,
    restore_random_state,
    write_random_state,
)
from megarl.checkpoint.restricted import read_plain, read_plain_index, restricted_loading
from megarl.checkpoint.staging import StagingBuffer
from megarl.checkpoint.storage import is_file, read_again
from megarl.distributed.device import DeviceRuntime
from megarl.errors import CheckpointError, MegarlError
from megarl.models.engine.backend import log_changed_rate
from megarl.models.megatron.cuda_redirect import cuda_literals
from megarl.models.megatron.hf_state import ADAPTER
from megarl.models.megatron.optimizer import fused_style_adam, schedule_values, with_parameters
from megarl.models.megatron.sharded_save import save_sharded
from megarl.models.megatron.state_stream import StateStream, StreamedLoad
from megarl.patched import patched


@contextlib.contextmanager
def exact_offsets() -> Iterator[StateStream]:
    """Yield a stream that saves and loads the state of Megatron's distributed optimizer. Within the context,
    Megatron-Core sees only outlines of this state; the stream has their values for ``save_sharded``, or reads
    them from a checkpoint."""
    stream = StateStream()

    def parameter_state(
        optimizer: DistributedOptimizer,
        use_gloo_comm: bool = True,
        empty_data: bool = False,
        return_on_all_ranks: bool = False,
    ) -> dict[Any, Any]:
        return stream.outlines(optimizer)

    def is_loaded(optimizer: DistributedOptimizer, state: dict[Any, Any]) -> None:
        """Do nothing: outlines have no values, and the stream reads the values into the optimizer
        afterwards."""

    # Megatron-Core runs the garbage collector over all objects of the process to free gathered tensors, of
    # which there are none here.
    with patched(
        (DistributedOptimizer, "get_parameter_state_dp_zero", parameter_state),
        (DistributedOptimizer, "load_parameter_state_from_fully_reshardable", is_loaded),
        (distrib_optimizer, "gc", SimpleNamespace(collect=lambda: 0)),
    ):
        yield stream


SCHEDULE_FILE = "schedule.json"
_EXTRA_STATE = "_extra_state"
_DISTRIBUTED_STATE = "optimizer.state.param."
# This is the key of the float32 weights of an optimizer that is not distributed.
_COPIES = "fp32_from_fp16_params"
# These bounds of the schedule are stored in a parameter group, but the configuration decides them.
_BOUNDS = ("max_lr", "min_lr")


def _metadata() -> dict[str, Any]:
    """Return the metadata that makes Megatron save optimizer state in a form that any layout can load. The
    dict is new each time, because Megatron adds its process groups to it."""
    return {"distrib_optim_sharding_type": "fully_reshardable", "chained_optim_avoid_prefix": True}


def _entry(chunk: int) -> str:
    """Return the key of one of several model chunks in a state dict, as in Megatron-LM. The tensors have the
    names of their layers."""
    return f"model{chunk}"


def _sharded(chunks: Sequence[DistributedDataParallel]) -> dict[str, Any]:
    """Return the sharded state of a checkpoint: that of the whole model or, if it has adapters, only that of
    the adapters and other trained parameters."""
    if any(f".{ADAPTER}." in name for name, _ in chunks[0].named_parameters()):
        # Describe each layer separately, because not every layer need have adapters.
        states = []
        for chunk in chunks:
            metadata = {**_metadata(), "non_homogeneous_layers": True}
            parameters = dict(chunk.module.named_parameters())
            kept = {}
            for name, value in chunk.module.sharded_state_dict(metadata=metadata).items():
                # A score layer may be trained with adapters.
                if f".{ADAPTER}." in name or (name in parameters and parameters[name].requires_grad):
                    kept[name] = value
            states.append(kept)
    else:
        states = [chunk.module.sharded_state_dict(metadata=_metadata()) for chunk in chunks]
    return states[0] if len(states) == 1 else {_entry(index): state for index, state in enumerate(states)}


def save_weights(
    chunks: Sequence[DistributedDataParallel],
    directory: Path,
    buffer: StagingBuffer | None,
    add: Callable[[Path], None],
) -> None:
    """Write the weights to ``directory``, or stage them. A collective over all ranks.

    ``add`` writes further files, on rank 0: those of the model, by which the checkpoint can be exported by
    itself (``megarl convert export``).
    """
    with appears_whole(directory) as partial, cuda_literals():
        save_sharded(_sharded(chunks), partial, StateStream(), buffer)
        with failing_together(f"writing config and tokenizer to {directory}"):
            if dist.get_rank() == 0:
                add(partial)


def load_weights(chunks: Sequence[DistributedDataParallel], directory: Path) -> None:
    """Load weights that any layout wrote. A collective over all ranks; after an error some weights may
    already be the checkpoint's.

    Raises:
        CheckpointError: the checkpoint holds another model, or is damaged.
    """
    with cuda_literals():
        loaded = _load(_sharded(chunks), directory, "weights", StreamedLoad(_places_of(chunks)))
        with failing_together(f"putting the weights of {directory} into the model"):
            for index, chunk in enumerate(chunks):
                state = loaded[_entry(index)] if len(chunks) > 1 else loaded
                elsewhere = {}
                for name, value in state.items():
                    # Leave out Transformer Engine's extra state, which would be unpickled: scales of FP8 that
                    # megarl does not use. Tensors on the meta device have already been read directly into the
                    # model's memory.
                    if not (name.endswith(_EXTRA_STATE) or getattr(value, "is_meta", False)):
                        elsewhere[name] = value
                # Load without strict, because what was already read is left out; _load has compared the
                # names.
                chunk.module.load_state_dict(elsewhere, strict=False)


def _places_of(chunks: Sequence[DistributedDataParallel]) -> frozenset[int]:
    """Return the addresses of the storages of all parameters and buffers."""
    addresses = set()
    for chunk in chunks:
        for tensor in (*chunk.module.parameters(), *chunk.module.buffers()):
            # Compare storages, not tensors, so that views of a weight in a sharded state dict count as the
            # weight.
            addresses.add(tensor.untyped_storage().data_ptr())
    return frozenset(addresses)


def save_optimizer(
    chunks: Sequence[DistributedDataParallel],
    optimizer: MegatronOptimizer,
    scheduler: OptimizerParamScheduler | None,
    runtime: DeviceRuntime,
    directory: Path,
    buffer: StagingBuffer | None = None,
) -> None:
    """Write optimizer state, schedule and every rank's random-number states to ``directory``; the optimizer
    state may be staged. A collective over all ranks."""
    with appears_whole(directory) as partial, cuda_literals(), fused_style_adam(), exact_offsets() as stream:
        _initialize_state(optimizer)
        _agree_on_steps(optimizer)
        weights = _sharded(chunks)
        # Adam is patched here too, because Megatron-Core reads step counts according to the class of Adam.
        state = _without_empty_copies(optimizer.sharded_state_dict(weights, metadata=_metadata()))
        save_sharded(state, partial, stream, buffer)
        with failing_together(f"writing schedule and random-number states to {directory}"):
            if dist.get_rank() == 0 and scheduler is not None:
                (partial / SCHEDULE_FILE).write_text(json.dumps(scheduler.state_dict()))
            write_random_state(partial, runtime)


def load_optimizer(
    chunks: Sequence[DistributedDataParallel],
    optimizer: MegatronOptimizer,
    scheduler: OptimizerParamScheduler | None,
    runtime: DeviceRuntime,
    directory: Path,
) -> None:
    """Load what ``save_optimizer`` wrote. Random-number states are restored if this rank existed when they
    were saved. A collective over all ranks; after an error some of the state may already be the checkpoint's.

    Raises:
        CheckpointError: the checkpoint belongs to another model, or is damaged.
    """
    with cuda_literals(), fused_style_adam(), exact_offsets() as stream:
        _initialize_state(optimizer)
        weights = _sharded(chunks)
        wanted = _without_empty_copies(
            optimizer.sharded_state_dict(weights, is_loading=True, metadata=_metadata())
        )
        strategy = StreamedLoad()
        loaded = _load(wanted, directory, "optimizer state", strategy)
        with failing_together(f"reading the optimizer state of {directory}"):
            stored = read_again(lambda: TorchDistCheckpoint(directory), str(directory))
            bounds = []
            for group in optimizer.param_groups:
                bounds.append({key: group[key] for key in _BOUNDS if key in group})
            optimizer.load_state_dict(_with_empty_states(loaded))
            for group, of_config in zip(optimizer.param_groups, bounds, strict=True):
                # Restore the bounds of the learning rate, which are loaded with the group and would undo a
                # change in the configuration.
                group.update(of_config)
            stream.fill(strategy.outlines, stored)
        # Checkpoints of earlier versions lack the step count of experts if the first stage has none.
        _agree_on_steps(optimizer)
    with failing_together(f"reading schedule and random-number states of {directory}"):
        schedule = directory / SCHEDULE_FILE
        if scheduler is not None and is_file(schedule):
            before = schedule_values(optimizer)["lr"]
            scheduler.num_steps = 0  # loading advances the schedule from its present step
            scheduler.load_state_dict(json.loads(read_again(schedule.read_text, str(schedule))))
            log_changed_rate(scheduler.num_steps, before, schedule_values(optimizer)["lr"])
        restore_random_state(directory, runtime)


def require_same_form(optimizer: MegatronOptimizer, directory: Path) -> None:
    """Raise a CheckpointError if the stored state is that of a distributed optimizer and this optimizer is
    not distributed, or the reverse: Megatron-Core stores master weights and moments of the two in different
    forms. Local."""
    # Decide by the index alone, before any tensor is read: a mismatch would fail deep inside Megatron-Core.
    stored = any(
        key.startswith(_DISTRIBUTED_STATE) for key in read_plain_index(directory).state_dict_metadata
    )
    inner = list(with_parameters(optimizer))
    own = any(isinstance(each, DistributedOptimizer) for each in inner)
    if inner and own != stored:
        raise CheckpointError(
            f"{directory} holds the state of an optimizer with use_distributed_optimizer = "
            f"{str(stored).lower()}, but this one has {str(own).lower()}, which cannot read it. "
            "Fix: set policy.megatron_cfg.optimizer.use_distributed_optimizer to "
            f"{str(stored).lower()}, or load only the weights, whose form is the same"
        )


def require(directory: Path) -> None:
    """Raise an error unless the path is a finished dist-checkpointing directory. Local.

    Raises:
        CheckpointError: it is not one.
        StorageError: the storage could not be read.
    """
    if not is_file(directory / CONFIG_FNAME):
        raise CheckpointError(
            f"{directory} is not a checkpoint (no {CONFIG_FNAME} there): give the directory that "
            "save_checkpoint was given"
        )


def require_output(directory: Path, *, scores: bool) -> None:
    """Raise a CheckpointError if the weights are a language model's and this model scores, or the reverse.
    Megatron-Core itself accepts an output layer of any number of rows, because vocabularies may be padded
    differently. Local."""
    stored = read_plain_index(directory).state_dict_metadata.get(OUTPUT_LAYER)
    rows = stored.size[0] if isinstance(stored, TensorStorageMetadata) else None
    if scores != (rows == 1):
        found = "no output layer of its own" if rows is None else f"{OUTPUT_LAYER} of {rows} rows"
        raise CheckpointError(
            f"{directory} holds {found}, and this model "
            f"{'scores, with 1' if scores else 'is a language model'}. Fix: set "
            f"policy.reward_model_cfg.enabled to {str(not scores).lower()}, or give another checkpoint"
        )


def _load(wanted: dict[str, Any], directory: Path, what: str, strategy: StreamedLoad) -> dict[str, Any]:
    """Return what ``directory`` holds for every entry of ``wanted``. A missing or surplus tensor is an error,
    not a warning, and an error of one rank is raised on all ranks."""
    readers: list[tuple[Any, str, Any]] = []
    loaded: dict[str, Any] = {}
    missing: list[str] = []
    unexpected: list[str] = []
    with failing_alike():
        readers = _read_already(directory, what, strategy)
    with failing_alike():
        loaded, missing, unexpected = _read(wanted, directory, what, strategy, readers)
    # Gather the names from all ranks: a pipeline stage requests only its own layers, and other ranks would
    # not learn what is missing there.
    only_there, only_here = missing, sorted(set(itertools.chain.from_iterable(gather_objects(unexpected))))
    if only_there or only_here:
        raise CheckpointError(
            f"{directory} does not hold the {what} of this model: only in the checkpoint {only_there[:3]}, "
            f"only in the model {only_here[:3]} "
            f"({len(only_there)} and {len(only_here)} in all). Check model_name and the path"
        )
    return loaded


def _read_already(directory: Path, what: str, strategy: StreamedLoad) -> list[tuple[Any, str, Any]]:
    """Read the files that each rank reads by itself, before all ranks read tensors together, because an error
    in the joint read would leave the other ranks waiting. Transient storage failures are retried. Only plain
    values are unpickled, whatever the environment sets for torch's default. Local.

    Returns:
        Replacements of Megatron-Core's functions, for ``patched``, that return what was read.
    """
    read_plain_index(directory)
    config, common_state = directory / CONFIG_FNAME, directory / common.COMMON_STATE_FNAME
    name, arguments = "verify_checkpoint", [str(directory)]
    # These versions choose the loading strategy in the same call, and store what all ranks share in a
    # separate file.
    if separate := hasattr(serialization, "verify_checkpoint_and_load_strategy"):
        name, arguments = "verify_checkpoint_and_load_strategy", [str(directory), strategy]
    verify = getattr(serialization, name)

    def verified() -> Any:
        try:
            return verify(*arguments)
        except CheckpointingException:
            # Verify again if the config exists: Megatron-Core takes a failed storage request for a missing
            # file.
            if not is_file(config):
                raise
            return verify(*arguments)

    with _as_own_errors(directory, what):
        answer = read_again(verified, str(config))
        shared = (
            read_plain(common_state)
            if separate or is_file(common_state)
            else _shared_beside_tensors(directory)
        )
    reader = (
        (common.TorchCommonLoadStrategy, "load_common")
        if separate
        else (serialization, "load_common_state_dict")
    )
    # Replace the readers: Megatron-Core would read both files again, without retries and with torch's own
    # unpickler.
    return [(serialization, name, lambda *unused: answer), (*reader, lambda *unused: shared)]


def _shared_beside_tensors(directory: Path) -> Any:
    """Read the state that all ranks share from a checkpoint that stores it as an object among the tensors."""
    with restricted_loading():
        return read_again(lambda: serialization.load_common_state_dict(directory), str(directory))


def _read(
    wanted: dict[str, Any],
    directory: Path,
    what: str,
    strategy: StreamedLoad,
    readers: Sequence[tuple[Any, str, Any]],
) -> tuple[dict[str, Any], list[str], list[str]]:
    """Return what ``directory`` holds for ``wanted``, the names of tensors that are only in the checkpoint,
    and the names of those that only this rank requests."""
    with _as_own_errors(directory, what), restricted_loading(), patched(*readers):
        # Use RETURN_ALL, because an error here would be raised on one rank only; the caller compares over all
        # ranks.
        loaded, missing, unexpected = dist_checkpointing.load(
            wanted, str(directory), strategy, strict=StrictHandling.RETURN_ALL
        )
    return loaded, _tensor_keys(missing), _tensor_keys(unexpected)


@contextlib.contextmanager
def _as_own_errors(directory: Path, what: str) -> Iterator[None]:
    """Convert errors of Megatron-Core and of DCP into megarl's, within the context."""
    try:
        yield
    # DCP's exception is not an Exception, and holds the errors of all ranks; megarl's errors among them are
    # raised unchanged.
    except CheckpointException as error:
        for cause, _ in error.failures.values():
            if isinstance(cause, MegarlError):
                raise cause from error
        raise CheckpointError(
            f"{directory} cannot be read: {error}. It is damaged; use another checkpoint"
        ) from error
    except (CheckpointingException, KeyError, ValueError) as error:
        if isinstance(error, MegarlError):
            raise
        raise CheckpointError(
            f"{directory} does not hold the {what} of this model: {error}. Check model_name and the path"
        ) from error
    except OSError as error:
        raise CheckpointError(f"{directory} cannot be read: {error}. Fix: check permissions there") from error


def _tensor_keys(keys: Iterable[str]) -> list[str]:
    """Return the sorted names of tensors. The (empty) extra state of linear layers is left out, because it
    differs between layer specs."""
    return sorted(key for key in keys if not key.endswith(_EXTRA_STATE))


def _initialize_state(optimizer: MegatronOptimizer) -> None:
    """Create the (zero) state of an optimizer that has not stepped yet, so that it can be saved or filled."""
    for inner in with_parameters(optimizer):
        if inner.init_state_fn is not None and not inner.optimizer.state:
            inner.init_state_fn(inner.optimizer, inner.config)


def _states_of(state: dict[Any, Any]) -> Iterator[dict[str, Any]]:
    """Yield the state of each optimizer of a chain, or of a single optimizer."""
    yield from [state] if "optimizer" in state or "param_groups" in state else state.values()


def _without_empty_copies(state: dict[Any, Any]) -> dict[Any, Any]:
    """Return the state without empty lists of float32 copies. Rank 0's first stage may have no experts, and
    its empty list would be stored in the checkpoint for all ranks."""
    for each in _states_of(state):
        if _COPIES in each and not any(each[_COPIES]):
            del each[_COPIES]
    return state


def _with_empty_states(loaded: dict[Any, Any]) -> dict[Any, Any]:
    """Add the empty entries that an optimizer without parameters on this rank expects, and that
    Megatron-Core's reader leaves out."""
    for each in _states_of(loaded):
        each.get("optimizer", each).setdefault("state", {})
        each.setdefault(_COPIES, [])
    return loaded


def _agree_on_steps(optimizer: MegatronOptimizer) -> None:
    """Set the step count of groups that lack one to that of the other groups; all parameters step together. A
    collective over all ranks.

    A group counts steps only on ranks that have parameters of it, and a checkpoint stores only rank 0's
    counts. If the first pipeline stage has only dense layers, the moments of all experts would be loaded with
    Adam's bias correction at its first step.
    """
    groups = optimizer.param_groups
    # Compare over all ranks: a group may have parameters only on other ranks, and counts steps only there.
    most = max(gather_objects(max((int(group.get("step", 0)) for group in groups), default=0)))
    for group in groups:
        if most and "step" not in group:
            group["step"] = most
