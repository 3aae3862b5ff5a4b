"""AdamW with one step counter per parameter group, as in the fused optimizers of Transformer Engine and
Apex.

torch's AdamW keeps a step tensor for every parameter. Megatron-Core's distributed optimizer saves only
tensors that have the parameter's shape, and the contents of the parameter groups; torch's counters would be
lost or shared after a resume. A counter in the group is saved, loaded and resharded without special cases.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from torch.optim.adam import adam
from torch.optim.adamw import adamw
from torch.optim.optimizer import StateDict

from megarl.errors import ConfigError
from megarl.models.engine.host_adam import HostAdam
from megarl.models.engine.low_precision_adam import LowPrecisionAdamW, step_shard
from megarl.models.engine.state_formats import BLOCK


class GroupStepAdamW(torch.optim.Optimizer):
    """Adam with decoupled weight decay (Loshchilov and Hutter, arXiv:1711.05101, algorithm 2).

    The arithmetic is that of ``torch.optim.adamw.adamw``'s fused kernel. Only the step counter is stored
    elsewhere: in ``param_group["step"]``, an int.

    Args:
        params: parameters or parameter groups.
        lr: learning rate.
        betas: decay rates of the first and the second moment.
        eps: added to the square root of the second moment.
        weight_decay: weight decay.
        decoupled: False adds the weight decay to the gradient (plain Adam).
        capturable: argument of newer Megatron-Core; must be False, because the step counter is a number on
            the host.

    Raises:
        ConfigError: ``capturable`` is True.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        decoupled: bool = True,
        capturable: bool = False,
    ) -> None:
        if capturable:
            raise ConfigError(
                "optimizer_cuda_graph = True needs Transformer Engine's fused Adam, which is not installed. "
                "Fix: install it or set False"
            )
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self.decoupled = decoupled

    def initialize_state(self, parameter: torch.Tensor) -> None:
        """Create zero moments for ``parameter`` unless it already has them."""
        if not self.state[parameter]:
            self.state[parameter] = {
                "exp_avg": torch.zeros_like(parameter.data),
                "exp_avg_sq": torch.zeros_like(parameter.data),
            }

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update the parameters from ``.grad``; parameters without a gradient do not change."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        # torch's functional forms do the arithmetic; only the step counters are kept here.
        update = adamw if self.decoupled else adam
        for group in self.param_groups:
            parameters, gradients, averages, squares = [], [], [], []
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.initialize_state(parameter)
                    parameters.append(parameter)
                    gradients.append(parameter.grad)
                    averages.append(self.state[parameter]["exp_avg"])
                    squares.append(self.state[parameter]["exp_avg_sq"])
            if not parameters:
                continue
            # Give each parameter a counter, because the update increments each one, on the device, where the
            # fused kernel reads it.
            steps = torch.full(
                (len(parameters),), float(group.get("step", 0)), device=parameters[0].device
            ).unbind()
            update(
                parameters,
                gradients,
                averages,
                squares,
                [],
                list(steps),
                amsgrad=False,
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=False,
                foreach=False,
                capturable=False,
                differentiable=False,
                # Use the fused kernel, on a CPU too; torch accepts only one of foreach and fused.
                fused=True,
            )
            group["step"] = int(group.get("step", 0)) + 1
        return loss


class GroupStepAdam(GroupStepAdamW):
    """``GroupStepAdamW`` with weight decay added to the gradient (Kingma and Ba, arXiv:1412.6980)."""

    def __init__(self, params: Iterable[Any], **options: Any) -> None:
        super().__init__(params, decoupled=False, **options)


class ShardedAdamW(LowPrecisionAdamW):
    """``LowPrecisionAdamW`` over the shards of Megatron-Core's distributed optimizer, with a step counter per
    parameter group.

    It reads gradients from ``decoupled_grad``, in the dtype in which data parallelism reduced them.

    Attributes:
        gradient_factor: factor by which the next step scales gradients, used for norm clipping. Scaling
            16-bit gradients in place would round them once more.
    """

    gradient_factor = 1.0
    _host: HostAdam | None = None

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Update the parameters that have a gradient.

        Kernels for state on the device are queued first and run while the CPU updates parameters whose state
        is in host memory. The CPU part may continue after the return; ``finish`` waits for it.
        """
        in_host_memory, host = [], self._in_host_memory()
        if host is not None:
            host.begin()
        for group in self.param_groups:
            parameters = [
                parameter
                for parameter in group["params"]
                if getattr(parameter, "decoupled_grad", None) is not None
            ]
            # A group without gradients on this rank does not count the step; _agree_on_steps corrects this
            # for checkpoints.
            if parameters:
                group["step"] = int(group.get("step", 0)) + 1
            for parameter in parameters:
                self.initialize_state(parameter)
                gradient = parameter.decoupled_grad.view(-1)
                for shard, numbers, in_host in self.shards(
                    parameter, gradient, group, group["step"], self.gradient_factor
                ):
                    if in_host and host is not None:
                        early = host.early(parameter)
                        # Norms, tied embeddings and float16 gradients are not copied during the backward
                        # pass, but now.
                        if early is not None:
                            shard = replace(shard, gradient=early, is_early=True)
                        in_host_memory.append((shard, numbers))
                    else:
                        step_shard(shard, self.settings, numbers)
        if host is not None:
            host.start(in_host_memory, self.settings)

    def finish(self) -> None:
        """Wait for the CPU's update of parameters with state in host memory; see ``HostAdam``."""
        if self._host is not None:
            self._host.finish()

    def _in_host_memory(self) -> HostAdam | None:
        if self._host is None and any(self.host_part.values()):
            self._host = HostAdam(next(iter(self.host_part)).device)
        return self._host

    def copy_early(self, parameter: torch.Tensor, gradient: torch.Tensor, wait: Callable[[], object]) -> None:
        """Start copying the gradient for a state in host memory; see ``HostAdam``.

        Args:
            parameter: a shard.
            gradient: the shard's gradient, flat.
            wait: waits until the gradient is reduced; see ``HostAdam``.
        """
        host, kept = self._in_host_memory(), self.host_part[parameter]
        if host is not None and kept:
            host.copy_early(parameter, gradient[:kept], wait)

    def forget_early(self) -> None:
        """Discard early gradient copies after a skipped step."""
        if self._host is not None:
            self._host.forget()

    def place_states(self) -> None:
        """Choose the parameters whose state is kept in host memory: the first ones, up to the configured
        fraction of all elements. The last of them is split."""
        parameters: list[torch.nn.Parameter] = []
        for group in self.param_groups:
            parameters += group["params"]
        count = sum(parameter.numel() for parameter in parameters)
        left = round(self.settings.host_share * count)
        self.host_part = {}
        for parameter in parameters:
            # Split at a multiple of BLOCK: a split block would get two scales, different from that of the
            # full block.
            part = parameter.numel() if left >= parameter.numel() else left // BLOCK * BLOCK
            self.host_part[parameter], left = part, left - part

    def copy_weights(self) -> None:
        """Update the master weights from weights that were written from outside."""
        for parameter in self.state:
            self._copy_weights(parameter)

    def state_dict(self) -> StateDict:
        """Return the hyperparameters and the state in its stored format. Megatron-Core saves only the
        hyperparameters."""
        # LowPrecisionAdamW's state_dict is for the torch backends; here state is streamed to the checkpoint
        # by state_stream.
        return torch.optim.Optimizer.state_dict(self)

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Load the hyperparameters; ``write_state`` loads the state."""
        kept = self.state
        # Load without the state: torch would cast it to the parameter's dtype, which corrupts other formats.
        torch.optim.Optimizer.load_state_dict(self, {**state_dict, "state": {}})
        self.state = kept


def copy_as_reduced(chunks: Sequence[DistributedDataParallel], inner: Any) -> None:
    """Make a model's buckets copy gradients for state in host memory during the backward pass, each as soon
    as data parallelism has reduced it.

    Only the copies can start that early. The step must wait for the end of the backward pass: clipping needs
    the norm of all gradients, and a non-finite norm forbids the step.

    Args:
        chunks: the model chunks; their gradient reductions must overlap with the backward pass.
        inner: a distributed optimizer whose Adam is a ``ShardedAdamW`` that has placed its states.
    """
    for chunk in chunks:
        tied = chunk.module.share_embeddings_and_output_weights
        final = {
            parameter
            for name, parameter in chunk.module.named_parameters()
            if _is_final(name, parameter, tied)
        }
        for group in chunk.bucket_groups + chunk.expert_parallel_bucket_groups:
            own = [
                parameter
                for parameter in group.param_to_bucket
                if parameter in final and parameter in inner.model_param_group_index_map
            ]
            # Patch the instance: Megatron-Core's backward hook calls this method as soon as a bucket is full.
            group.start_grad_sync = functools.partial(
                _start_and_copy, group.start_grad_sync, group, inner, own
            )


def _is_final(name: str, parameter: Any, tied: bool) -> bool:
    """Return whether no reduction changes a parameter's gradient after data parallelism.

    ``finalize_model_grads`` later reduces gradients of norms, of a tied embedding, and of replicated
    parameters under sequence parallelism.
    """
    later = parameter.ndim == 1 or (tied and ("word_embeddings" in name or "output_layer" in name))
    marks = ("sequence_parallel", "average_gradients_across_tp_domain")
    return not later and not any(getattr(parameter, mark, False) for mark in marks)


def _start_and_copy(
    start: Callable[..., None],
    group: Any,
    inner: Any,
    parameters: Sequence[torch.nn.Parameter],
    *arguments: Any,
    **options: Any,
) -> None:
    start(*arguments, **options)
    adam: ShardedAdamW = inner.optimizer
    # The handle is None after a synchronous reduction, when there is nothing to wait for.
    handle = group.grad_reduce_handle
    for parameter in parameters:
        place, order = inner.model_param_group_index_map[parameter]
        shard = adam.param_groups[place]["params"][order]
        owned = inner._get_model_param_range_map(parameter)["param"]
        # Copy only this rank's part of the reduce-scatter; the rest of the buffer is not summed.
        gradient = parameter.main_grad.view(-1)[owned.start : owned.end]
        adam.copy_early(shard, gradient, handle.wait if handle is not None else lambda: None)
