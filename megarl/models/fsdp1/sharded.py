"""A model sharded over all ranks by torch's FullyShardedDataParallel, one transformer layer per FSDP unit."""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import warnings
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffload,
    FullyShardedDataParallel,
    MixedPrecision,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictType,
)
from torch.distributed.fsdp._runtime_utils import _reshard
from torch.distributed.fsdp.wrap import lambda_auto_wrap_policy

from megarl.distributed.device import DeviceRuntime
from megarl.models.engine.backend import Place
from megarl.models.engine.low_precision_adam import add_to_sum
from megarl.models.fsdp1.build import Filler, Held, named
from megarl.models.huggingface import checkpoint
from megarl.models.huggingface.loading import layers_of
from megarl.weight_sync.plan import WeightIterator, Weights

logger = logging.getLogger(__name__)


def _sum_gradients(group: dist.ProcessGroup, whole: torch.Tensor, shard: torch.Tensor) -> None:
    """Communication hook that sums gradients over the ranks; FSDP's own reduction averages them."""
    dist.reduce_scatter_tensor(shard, whole, group=group)


class _SumInFloat32:
    """Accumulates a parameter's gradient in float32. FSDP calls it after each reduction, like an optimizer
    that steps during the backward pass."""

    def __init__(self, parameter: nn.Parameter) -> None:
        self._parameter = parameter

    def step(self) -> None:
        """Add the gradient to the parameter's float32 gradient sum."""
        add_to_sum(self._parameter)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Do nothing: ``step`` has already freed the gradient."""


class Sharded:
    """A model of which every rank keeps an equal shard of every FSDP unit.

    Gradients are reduced in float32 after every micro-batch and accumulated as shards, so no rank holds full
    gradients of more than one unit.

    Args:
        module: model on the meta device.
        fill: loads the parameters, one unit at a time.
        dtype: dtype of the computation.
        runtime: device of this process.
        offload: keep parameters, gradients and optimizer state in host memory between uses.

    Attributes:
        offloads: True if they are kept in host memory; always False on a CPU.
    """

    def __init__(
        self, module: nn.Module, fill: Filler, dtype: torch.dtype, runtime: DeviceRuntime, *, offload: bool
    ) -> None:
        if offload and not runtime.is_cuda:
            logger.info("fsdp_offload_enabled: on a CPU all memory is host memory; nothing is offloaded")
        self.offloads = offload and runtime.is_cuda
        self._runtime = runtime
        self._group = dist.group.WORLD
        self._held = fill.held
        layers = set(layers_of(module))
        self.module = FullyShardedDataParallel(
            module,
            auto_wrap_policy=functools.partial(lambda_auto_wrap_policy, lambda_fn=layers.__contains__),
            mixed_precision=MixedPrecision(
                param_dtype=dtype, reduce_dtype=torch.float32, buffer_dtype=torch.float32
            ),
            cpu_offload=CPUOffload(offload_params=True) if self.offloads else None,
            sharding_strategy=ShardingStrategy.FULL_SHARD,
            param_init_fn=fill,
            device_id=runtime.device,
            device_mesh=init_device_mesh(runtime.device.type, (dist.get_world_size(),)),
            # Keep named parameters: checkpoints need the names, and vectors get their own parameter group.
            use_orig_params=True,
        )
        if fill.dtype is not torch.float32:
            # Set these before the next line: FSDP looks for them only once, when it determines the root unit.
            for _, parameter in self.parameters():
                parameter._in_backward_optimizers = [_SumInFloat32(parameter)]  # type: ignore[attr-defined]
        self.module.register_comm_hook(self._group, _sum_gradients)
        self._units = FullyShardedDataParallel.fsdp_modules(self.module)
        unit_of: dict[nn.Module, FullyShardedDataParallel] = {}
        for unit in self._units:  # Outer units come first, so that inner ones override them.
            unit_of.update(dict.fromkeys(unit.modules(), unit))
        self._unit_of = {name: unit_of[place.module] for name, place in self._held.items()}

    def parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield this rank's flat shard of every parameter; a shard may be empty."""
        return named(self._held)

    def before_pass(self) -> None:
        """Do nothing: FSDP reads the parameters themselves."""

    def after_pass(self) -> None:
        """Reshard the root unit, which FSDP keeps gathered after a forward pass without a backward pass.

        Otherwise the next pass would reuse the gathered parameters, although the shards may have changed (by
        the reference policy or a checkpoint).
        """
        if self.module._is_root and self.module._handle is not None:
            _reshard(self.module, self.module._handle, True)

    def full_tensors(self, names: Sequence[str]) -> WeightIterator:
        """Yield the full parameters ``names`` as copies. Collective over all ranks.

        Consecutive names in one unit are gathered together, so an order by layers gathers each layer once.
        """
        for unit, neighbours in itertools.groupby(names, key=self._unit_of.__getitem__):
            yield from self._gathered(unit, {name: self._held[name] for name in neighbours})

    def _gathered(self, unit: FullyShardedDataParallel, held: dict[str, Held]) -> Weights:
        # recurse=False gathers one unit at a time, so that no rank holds more than a layer.
        with FullyShardedDataParallel.summon_full_params(unit, recurse=False, writeback=False):
            return [
                (name, parameter.detach().view(held[name].shape).clone()) for name, parameter in named(held)
            ]

    def state(self) -> dict[str, torch.Tensor]:
        """Return the weights for a checkpoint, as DTensors. After loading into them, pass them to
        ``load_state``. Collective."""
        with self._state_dict_type():
            state = self.module.state_dict()
        return {name: state[name] for name in self._held}

    def load_state(self, state: dict[str, torch.Tensor]) -> None:
        """Copy a loaded ``state`` into the parameters. Collective."""
        with self._state_dict_type():
            self.module.load_state_dict({name: state[first] for name, first in self._first_names().items()})

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> checkpoint.OptimizerState:
        """Return the optimizer state by parameter name, as DTensors. Collective."""
        groups = checkpoint.named_groups(optimizer, checkpoint.names_of(self.parameters()))
        begun = torch.tensor(float(len(optimizer.state)), device=self._runtime.device)
        # Sum over the ranks: a rank may hold no element of any parameter, and thus no state, while others do.
        dist.all_reduce(begun, group=self._group)
        # No rank has stepped yet: there is no state for FSDP to gather.
        if not begun:
            return {"state": {}, "param_groups": groups}
        with self._state_dict_type():
            state = FullyShardedDataParallel.optim_state_dict(self.module, optimizer)["state"]
        first_names = self._first_names()
        return {
            "state": {first_names[name]: values for name, values in state.items()},
            "param_groups": groups,
        }

    def load_optimizer_state(
        self, optimizer: torch.optim.Optimizer, loaded: checkpoint.OptimizerState
    ) -> None:
        """Load the result of ``optimizer_state``. Collective."""
        state: dict[int, dict[str, torch.Tensor]] = {}
        if loaded["state"]:
            with self._state_dict_type():
                whole = dict(loaded)
                state = FullyShardedDataParallel.optim_state_dict_to_load(self.module, optimizer, whole)[
                    "state"
                ]
        checkpoint.install(optimizer, state, loaded, checkpoint.names_of(self.parameters()))

    def _first_names(self) -> dict[str, str]:
        """Return the first name of each parameter by each of its names; tied parameters have several."""
        first_names: dict[str, str] = {}
        for first, place in self._held.items():
            first_names.update(dict.fromkeys(place.names, first))
        return first_names

    @contextlib.contextmanager
    def _state_dict_type(self) -> Iterator[None]:
        options = (StateDictType.SHARDED_STATE_DICT, ShardedStateDictConfig(), ShardedOptimStateDictConfig())
        with (
            warnings.catch_warnings(action="ignore"),
            FullyShardedDataParallel.state_dict_type(self.module, *options),
        ):
            yield

    @torch.no_grad()
    def move(self, place: Place) -> None:
        """Move parameters and buffers to the device or to host memory."""
        target = self._runtime.device if place == "device" else torch.device("cpu")
        for unit in self._units:
            handle = unit._handle
            if handle is not None:
                handle.flat_param_to(target)
                # FSDP holds a second reference to its shard, which would otherwise restore the old memory.
                handle.flat_param._local_shard = handle.flat_param.data
        for buffer in self.module.buffers():
            buffer.data = buffer.data.to(target)
