"""Whether a tensor-parallel plan that is not ours gives right gradients.

A plan says which modules are divided. A module that it leaves out, for example a norm over the heads of which each rank has some, works on
whatever its neighbours give it; where that is only a part of an activation, each rank finds a part of its parameters' gradients, and
nothing would ever add the parts up. Two checks catch that: one of shapes while the model is built, which names the module, and one of the
gradients themselves before the first optimizer step, which needs no model that runs on the meta device.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from megarl.errors import ConfigError
from megarl.models.dtensor.parallelize import divide_over_tensor_ranks
from megarl.models.dtensor.plans import Plan
from megarl.models.dtensor.shards import block_of
from megarl.models.engine.attention import ROWS

logger = logging.getLogger(__name__)

Shapes: TypeAlias = dict[str, tuple[int, ...]]

# of each rank in the pass that looks at shapes, so that a sequence can be shared
POSITIONS = 4
# in parts of a gradient's norm: ranks that compute the same find the same to the bit, up to kernels that add in any order, while parts of a
# gradient differ by about its own size
TOLERANCE = 1e-2
# in parts of the largest norm of all: a gradient below it may be what rounding leaves of zero
ROUNDING = 1e-7


def divide_and_check(model: Any, mesh: DeviceMesh, plan: Plan) -> None:
    """``divide_over_tensor_ranks``, refusing a plan that leaves a whole parameter to work on a part of an activation.

    Raises:
        ConfigError: names every such parameter; or as ``divide_over_tensor_ranks`` does.
    """
    positions = POSITIONS * mesh.size()
    whole = _output_shapes(model, positions)
    divide_over_tensor_ranks(model, mesh, plan)
    divided = _output_shapes(model, positions) if whole is not None else None
    if whole is None or divided is None:
        if dist.get_rank() == 0:
            logger.warning("the tensor-parallel plan cannot be checked ahead; its gradients will be, before the first optimizer step")
        return
    modules = dict(model.named_modules())
    partial = [
        f"{name}.{parameter} (its module gives {list(divided[name])} of {list(shape)})"
        for name, shape in whole.items()
        if name in divided and divided[name] != shape
        for parameter, value in modules[name]._parameters.items()
        if value is not None and not isinstance(value, DTensor)
    ]
    if partial:
        raise ConfigError(
            f"policy.dtensor_cfg.custom_parallel_plan: {_some(partial)}: each tensor-parallel rank has all of the parameter but works on "
            "a part of the activation, so that its gradient would be wrong. Fix: give the module a style: to a norm of heads "
            "replicated_with_grad_allreduce, to a norm between layers that share the sequence sequence_parallel"
        )


def _output_shapes(model: Any, positions: int) -> Shapes | None:
    """The shape of what each module with parameters of its own gives for one row of tokens, in a pass on the meta device.

    Returns:
        Shapes by module name, of this rank's part where an output is divided; None for a model that cannot run on the meta device, which
        is no fault of the plan.
    """
    shapes: Shapes = {}

    def note(name: str, output: Any) -> None:
        if isinstance(output, torch.Tensor):
            shapes[name] = tuple((output.to_local() if isinstance(output, DTensor) else output).shape)

    handles = [
        module.register_forward_hook(lambda _, inputs, output, name=name: note(name, output))
        for name, module in model.named_modules()
        if module._parameters
    ]
    tokens = torch.zeros(1, positions, dtype=torch.int64, device="meta")
    places = torch.arange(positions, device="meta")[None]
    try:
        with torch.no_grad():
            model(input_ids=tokens, position_ids=places, sequence_layout=ROWS, use_cache=False)
    except Exception as error:
        # the model's own code, or a style of the user's, may fail in any way where there are no numbers
        logger.info("%s cannot run without memory (%s: %s)", type(model).__name__, type(error).__name__, error)
        return None
    finally:
        for handle in handles:
            handle.remove()
    return shapes


class ReplicaCheck:
    """Compares the gradients of whole parameters between tensor-parallel ranks until each was seen to agree once.

    Args:
        parameters: all of the model by name, divided by ``fully_shard``; those that a plan cuts are not looked at.
        group: the tensor-parallel ranks.
        device: where collectives work.
    """

    def __init__(self, parameters: Mapping[str, DTensor], group: dist.ProcessGroup, device: torch.device) -> None:
        self._group = group
        self._device = device
        self._pending = {
            name: parameter
            for name, parameter in parameters.items()
            if parameter.requires_grad and block_of(parameter).tensor_dimension is None
        }

    @torch.no_grad()
    def __call__(self) -> None:
        """Look at the present gradients. A collective over all ranks while there is something left to look at.

        Raises:
            ConfigError: on all ranks, when a gradient differs; names the parameters.
        """
        if not self._pending:
            return
        # [2, parameters]: largest difference between two ranks, largest norm
        figures = torch.tensor([self._compare(parameter) for parameter in self._pending.values()], dtype=torch.float64).t()
        figures = figures.contiguous().to(self._device)
        dist.all_reduce(figures, op=dist.ReduceOp.MAX)
        differences, norms = figures.cpu().unbind(0)
        floor = ROUNDING * float(norms.max())
        shares = (differences / norms.clamp(min=floor or 1.0)).tolist()
        wrong = [f"{name} (by {share:.0%})" for name, share in zip(self._pending, shares, strict=True) if share > TOLERANCE]
        if wrong:
            raise ConfigError(
                f"policy.dtensor_cfg.custom_parallel_plan: the gradient of {_some(wrong)} is not the same on all tensor-parallel ranks, "
                "though each of them has all of the parameter. Fix: give its module a style that adds the parts up, "
                "replicated_with_grad_allreduce or sequence_parallel"
            )
        # a gradient of zeros agrees whatever the plan
        seen = {name for name, norm in zip(self._pending, norms.tolist(), strict=True) if norm > floor}
        self._pending = {name: parameter for name, parameter in self._pending.items() if name not in seen}

    def _compare(self, parameter: DTensor) -> tuple[float, float]:
        """Norm of the difference between this rank's gradient and the first rank's, and the larger norm of the two."""
        gradient = parameter.grad
        local = gradient.to_local() if isinstance(gradient, DTensor) else torch.zeros_like(parameter.to_local())
        mine = local.detach().to(self._device).contiguous()
        theirs = mine.clone()
        dist.broadcast(theirs, src=dist.get_global_rank(self._group, 0), group=self._group)
        return float((mine - theirs).norm()), max(float(mine.norm()), float(theirs.norm()))


def _some(words: list[str], most: int = 4) -> str:
    return ", ".join(words[:most]) + (f" and {len(words) - most} more" if len(words) > most else "")
