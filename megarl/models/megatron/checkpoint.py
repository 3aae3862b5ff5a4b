"""Checkpoints through Megatron-Core's dist-checkpointing, which can be loaded in any parallel layout.

A checkpoint directory is complete or absent: files are written next to it, synced to disk, and renamed by
rank 0 alone.

The distributed optimizer's state goes through ``state_stream`` to get the right offsets. Megatron-Core up to
0.19 joins the gathered buckets of a buffer without their padding, but slices parameters at offsets that
include the padding. With two or more buckets (large models, or tied embeddings over pipeline stages) every
parameter after the first bucket would be saved from a wrong offset.
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
from megatron.core.dist_checkpointing.mapping import ShardedStateDict, StateDict
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
    """Within the context, make Megatron-Core save and load outlines of the distributed optimizer's state;
    yield their stream.

    ``save_sharded`` gets the values from the stream on a save; on a load the stream reads them from the
    checkpoint.
    """
    stream = StateStream()

    def parameter_state(
        optimizer: DistributedOptimizer,
        use_gloo_comm: bool = True,
        empty_data: bool = False,
        return_on_all_ranks: bool = False,
    ) -> dict[Any, Any]:
        return stream.outlines(optimizer)

    def is_loaded(optimizer: DistributedOptimizer, state: dict[Any, Any]) -> None:
        """Do nothing: outlines have no values; the stream later reads the values into the optimizer."""

    # Megatron-Core runs the garbage collector over the whole process to free gathered tensors; here there are
    # none.
    with patched(
        (DistributedOptimizer, "get_parameter_state_dp_zero", parameter_state),
        (DistributedOptimizer, "load_parameter_state_from_fully_reshardable", is_loaded),
        (distrib_optimizer, "gc", SimpleNamespace(collect=lambda: 0)),
    ):
        yield stream


SCHEDULE_FILE = "schedule.json"
_EXTRA_STATE = "_extra_state"
_DISTRIBUTED_STATE = "optimizer.state.param."
# Key of the master weights of an optimizer that is not distributed.
_COPIES = "fp32_from_fp16_params"
# Parameter groups also store these bounds of the schedule, but the configuration decides them.
_BOUNDS = ("max_lr", "min_lr")


def _metadata() -> dict[str, object]:
    """Return new metadata with which Megatron saves optimizer state loadable in any layout. Megatron adds its
    process groups to the dict, so it must not be reused."""
    return {"distrib_optim_sharding_type": "fully_reshardable", "chained_optim_avoid_prefix": True}


def _entry(chunk: int) -> str:
    """Return the state-dict key of one of several model chunks, as in Megatron-LM."""
    return f"model{chunk}"


def _sharded(chunks: Sequence[DistributedDataParallel]) -> ShardedStateDict:
    """Return the sharded state dict of the model; with adapters, only of the adapters and other trained
    parameters."""
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
    """Write the weights to ``directory``, or stage them. Collective over all ranks.

    On rank 0 ``add`` writes the model's further files (config, tokenizer), with which ``megarl convert
    export`` can export the checkpoint by itself.
    """
    with appears_whole(directory) as partial, cuda_literals():
        save_sharded(_sharded(chunks), partial, StateStream(), buffer)
        with failing_together(f"writing config and tokenizer to {directory}"):
            if dist.get_rank() == 0:
                add(partial)


def load_weights(chunks: Sequence[DistributedDataParallel], directory: Path) -> None:
    """Load weights that were saved in any layout. Collective over all ranks. After an error some weights may
    already be overwritten.

    Raises:
        CheckpointError: the checkpoint is of another model, or damaged.
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
    """Return the storage addresses of all parameters and buffers."""
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
    """Write optimizer state, schedule and every rank's random-number state to ``directory``. The optimizer
    state may be staged. Collective over all ranks."""
    with appears_whole(directory) as partial, cuda_literals(), fused_style_adam(), exact_offsets() as stream:
        _initialize_state(optimizer)
        _agree_on_steps(optimizer)
        weights = _sharded(chunks)
        # The Adam patch is needed here too, because Megatron-Core handles step counts by the class of Adam.
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
    """Load what ``save_optimizer`` wrote. Collective over all ranks. After an error some of the state may
    already be overwritten.

    A rank's random-number state is restored if the saving run had a rank of that number.

    Raises:
        CheckpointError: the checkpoint is of another model, or damaged.
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
                # Restore the configured learning-rate bounds, which the loaded parameter group overwrote.
                group.update(of_config)
            stream.fill(strategy.outlines, stored)
        # Checkpoints of earlier megarl versions lack the experts' step count if the first stage has no
        # experts.
        _agree_on_steps(optimizer)
    with failing_together(f"reading schedule and random-number states of {directory}"):
        schedule = directory / SCHEDULE_FILE
        if scheduler is not None and is_file(schedule):
            before = schedule_values(optimizer)["lr"]
            scheduler.num_steps = 0  # loading advances the schedule from its current step
            scheduler.load_state_dict(json.loads(read_again(schedule.read_text, str(schedule))))
            log_changed_rate(scheduler.num_steps, before, schedule_values(optimizer)["lr"])
        restore_random_state(directory, runtime)


def require_same_form(optimizer: MegatronOptimizer, directory: Path) -> None:
    """Check that the stored state and this optimizer are both distributed or both not, because Megatron-Core
    stores master weights and moments of the two differently. Local.

    Raises:
        CheckpointError: they differ.
    """
    # Decide by the index, before any tensor is read: a mismatch would fail deep inside Megatron-Core.
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
    """Check that the path is a complete dist-checkpointing directory. Local.

    Raises:
        CheckpointError: it is not.
        StorageError: the storage cannot be read.
    """
    if not is_file(directory / CONFIG_FNAME):
        raise CheckpointError(
            f"{directory} is not a checkpoint (no {CONFIG_FNAME} there): give the directory that "
            "save_checkpoint was given"
        )


def require_output(directory: Path, *, scores: bool) -> None:
    """Check that both the stored weights and this model have a score layer, or both a language-model output
    layer. Local.

    Megatron-Core itself would accept an output layer of any number of rows, because of vocabulary padding.

    Raises:
        CheckpointError: they differ.
    """
    stored = read_plain_index(directory).state_dict_metadata.get(OUTPUT_LAYER)
    rows = stored.size[0] if isinstance(stored, TensorStorageMetadata) else None
    if scores != (rows == 1):
        found = "no output layer of its own" if rows is None else f"{OUTPUT_LAYER} of {rows} rows"
        raise CheckpointError(
            f"{directory} holds {found}, and this model "
            f"{'scores, with 1' if scores else 'is a language model'}. Fix: set "
            f"policy.reward_model_cfg.enabled to {str(not scores).lower()}, or give another checkpoint"
        )


def _load(wanted: ShardedStateDict, directory: Path, what: str, strategy: StreamedLoad) -> StateDict:
    """Return the stored values of every entry of ``wanted``. A missing or surplus tensor is an error, and an
    error on one rank is raised on all. Collective over all ranks."""
    readers: list[tuple[Any, str, Any]] = []
    loaded: StateDict = {}
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
    """Read the files that each rank reads by itself, ahead of the collective read of tensors, in which an
    error would leave the other ranks waiting. Local.

    Transient storage failures are retried. Only plain values are unpickled, whatever default the environment
    sets for torch.

    Returns:
        Replacements of Megatron-Core's functions, for ``patched``, that return what was read.
    """
    read_plain_index(directory)
    config, common_state = directory / CONFIG_FNAME, directory / common.COMMON_STATE_FNAME
    name, arguments = "verify_checkpoint", [str(directory)]
    # These versions of Megatron-Core choose the load strategy in the same call and store the common state in
    # a separate file.
    if separate := hasattr(serialization, "verify_checkpoint_and_load_strategy"):
        name, arguments = "verify_checkpoint_and_load_strategy", [str(directory), strategy]
    verify = getattr(serialization, name)

    def verified() -> Any:
        try:
            return verify(*arguments)
        except CheckpointingException:
            # Retry if the config exists: Megatron-Core reports a failed storage request as a missing file.
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
    # Replace the readers, because Megatron-Core would read both files again, without retries and with torch's
    # own unpickler.
    return [(serialization, name, lambda *unused: answer), (*reader, lambda *unused: shared)]


def _shared_beside_tensors(directory: Path) -> Any:
    """Read the common state from a checkpoint that stores it as an object among the tensors."""
    with restricted_loading():
        return read_again(lambda: serialization.load_common_state_dict(directory), str(directory))


def _read(
    wanted: ShardedStateDict,
    directory: Path,
    what: str,
    strategy: StreamedLoad,
    readers: Sequence[tuple[Any, str, Any]],
) -> tuple[StateDict, list[str], list[str]]:
    """Return the stored values for ``wanted``, the names of tensors that are only in the checkpoint, and the
    names that only this rank requests."""
    with _as_own_errors(directory, what), restricted_loading(), patched(*readers):
        # RETURN_ALL, because any other mode would raise on one rank only; the caller compares over all ranks.
        loaded, missing, unexpected = dist_checkpointing.load(
            wanted, str(directory), strategy, strict=StrictHandling.RETURN_ALL
        )
    return loaded, _tensor_keys(missing), _tensor_keys(unexpected)


@contextlib.contextmanager
def _as_own_errors(directory: Path, what: str) -> Iterator[None]:
    """Within the context, convert errors of Megatron-Core and DCP into megarl's errors."""
    try:
        yield
    # DCP's exception derives from BaseException and contains the errors of all ranks; a megarl error among
    # them is raised unchanged.
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
    """Return the sorted tensor names, without the (empty) extra state of linear layers, which differs between
    layer specs."""
    return sorted(key for key in keys if not key.endswith(_EXTRA_STATE))


def _initialize_state(optimizer: MegatronOptimizer) -> None:
    """Create the zero state of an optimizer that has not stepped yet, so that it can be saved or loaded."""
    for inner in with_parameters(optimizer):
        if inner.init_state_fn is not None and not inner.optimizer.state:
            inner.init_state_fn(inner.optimizer, inner.config)


def _states_of(state: dict[Any, Any]) -> Iterator[StateDict]:
    """Yield the state of each optimizer in a chain, or of a single optimizer."""
    yield from [state] if "optimizer" in state or "param_groups" in state else state.values()


def _without_empty_copies(state: dict[Any, Any]) -> dict[Any, Any]:
    """Remove empty lists of master weights from the state. If rank 0's stage has no experts, its empty list
    would be stored in the checkpoint for all ranks."""
    for each in _states_of(state):
        if _COPIES in each and not any(each[_COPIES]):
            del each[_COPIES]
    return state


def _with_empty_states(loaded: dict[Any, Any]) -> dict[Any, Any]:
    """Add the empty entries that an optimizer without parameters on this rank expects and Megatron-Core's
    reader omits."""
    for each in _states_of(loaded):
        each.get("optimizer", each).setdefault("state", {})
        each.setdefault(_COPIES, [])
    return loaded


def _agree_on_steps(optimizer: MegatronOptimizer) -> None:
    """Set a missing step count of a group to that of the other groups; all parameters step together.
    Collective over all ranks.

    A group counts steps only on ranks that have parameters of it, but a checkpoint stores only rank 0's
    counts. If the first pipeline stage has only dense layers, the experts' moments would be loaded with the
    bias correction of Adam's first step.
    """
    groups = optimizer.param_groups
    # Compare over all ranks: a group may have parameters only on other ranks, and counts steps only there.
    most = max(gather_objects(max((int(group.get("step", 0)) for group in groups), default=0)))
    for group in groups:
        if most and "step" not in group:
            group["step"] = most
