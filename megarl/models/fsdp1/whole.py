"""A model on a single rank, neither sharded nor wrapped."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import nn

from megarl.distributed.device import DeviceRuntime
from megarl.models.engine.backend import Place
from megarl.models.engine.low_precision_adam import add_to_sum
from megarl.models.fsdp1.build import Filler, named
from megarl.models.huggingface import checkpoint


class FullModel:
    """A model on a single rank that computes in ``dtype``, with float32 gradients.

    If parameters are stored in another dtype than ``dtype``, the stored ones are master weights and the
    module holds copies in ``dtype``. Each micro-batch's gradient is added to the float32 gradient as soon as
    it is computed, as FSDP does.

    Args:
        module: model on the meta device.
        fill: loads the parameters.
        dtype: dtype of the computation.
        runtime: device of this process.
    """

    offloads = False

    def __init__(self, module: nn.Module, fill: Filler, dtype: torch.dtype, runtime: DeviceRuntime) -> None:
        for part in module.modules():
            fill(part)
        self.module = module.to(runtime.device)
        self._runtime = runtime
        self._held = fill.held
        self._masters: dict[str, nn.Parameter] = {}
        if dtype != fill.dtype:
            self._keep_masters(dtype)
        elif dtype != torch.float32:
            for _, parameter in named(self._held):
                parameter.register_post_accumulate_grad_hook(add_to_sum)

    def _keep_masters(self, dtype: torch.dtype) -> None:
        for name, parameter in named(self._held):
            master = nn.Parameter(parameter.detach().clone(), requires_grad=parameter.requires_grad)
            self._masters[name] = master
            # Replace the data, not the parameter, so that tied modules still share one.
            parameter.data = parameter.data.to(dtype)
            if parameter.requires_grad:
                # Accumulate in float32: in 16 bits a small gradient would be lost next to the sum.
                parameter.register_post_accumulate_grad_hook(_adding_to(master))

    def parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Return an iterator over the names and tensors that the optimizer updates: float32 master weights if
        there are any, else the module's parameters."""
        return iter(self._masters.items()) if self._masters else named(self._held)

    @torch.no_grad()
    def before_pass(self) -> None:
        """Copy the master weights, if any, into the module."""
        for name, master in self._masters.items():
            self._held[name].get().copy_(master)

    def after_pass(self) -> None:
        """Do nothing: no parameter was gathered."""

    def full_tensors(self, names: Sequence[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """Return an iterator over the full parameters ``names``, not copied."""
        parameters = dict(self.parameters())
        for name in names:
            yield name, parameters[name].detach()

    def state(self) -> dict[str, torch.Tensor]:
        """Return the weights for a checkpoint; writing to them changes the parameters."""
        return {name: parameter.detach() for name, parameter in self.parameters()}

    def load_state(self, state: dict[str, torch.Tensor]) -> None:
        """Do nothing: the tensors of ``state`` are the parameters themselves."""

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> checkpoint.OptimizerState:
        """Return the optimizer state by parameter name."""
        return checkpoint.named_optimizer_state(optimizer, self.parameters())

    def load_optimizer_state(
        self, optimizer: torch.optim.Optimizer, loaded: checkpoint.OptimizerState
    ) -> None:
        """Load the result of ``optimizer_state``."""
        checkpoint.install_optimizer_state(optimizer, self.parameters(), loaded)

    @torch.no_grad()
    def move(self, place: Place) -> None:
        """Move parameters and buffers to the device or to host memory."""
        target = self._runtime.device if place == "device" else torch.device("cpu")
        self.module.to(target)
        for master in self._masters.values():
            # Replace the data, not the tensor, to which the optimizer refers.
            master.data = master.data.to(target)


def _adding_to(master: nn.Parameter) -> Callable[[torch.Tensor], None]:
    """Return a hook that adds a half-precision gradient to the master weight's float32 gradient and frees
    it."""

    def add(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        if master.grad is None:
            master.grad = parameter.grad.float()
        else:
            master.grad.add_(parameter.grad)
        parameter.grad = None

    return add
