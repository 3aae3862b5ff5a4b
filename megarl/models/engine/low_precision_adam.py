"""Adam with decoupled weight decay (Loshchilov and Hutter, arXiv:1711.05101) whose optimizer state is stored
in fewer bits.

Arithmetic is float32, by torch's fused kernel, on one slice of a shard at a time: the state is read from its
format, stepped, and stored again with stochastic rounding (``state_formats``). Memory use is the stored state
plus one slice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim.adam import adam
from torch.optim.adamw import adamw
from torch.optim.optimizer import StateDict

from megarl.models.engine.state_formats import BLOCK, FORMATS, StateFormat, random_bits

MOMENTS = ("exp_avg", "exp_avg_sq")
MASTER = "master_param"
HOST = "host_"
"""Prefix of the keys of optimizer state in host memory."""
SLICES = {"cpu": BLOCK * 2**8, "cuda": BLOCK * 2**14}
"""Number of elements that are stepped at a time, by device type. On a CPU, this number fits into the
caches."""
_HALF = 0xFFFF


@dataclass(frozen=True, slots=True)
class StateSettings:
    """Storage formats of one optimizer's state.

    Attributes:
        master: ``float32`` keeps float32 master copies of 16-bit weights; ``bfloat16`` steps the weights
            themselves, with stochastic rounding.
        exp_avg, exp_avg_sq: formats of the two moments.
        host_share: fraction of the state's bytes that is in host memory.
        seed: seed of the stochastic rounding.
    """

    master: str = "float32"
    exp_avg: str = "float32"
    exp_avg_sq: str = "float32"
    host_share: float = 0.0
    seed: int = 0

    @property
    def are_plain(self) -> bool:
        """True if the whole state is float32 and on the device of the weights."""
        return {self.master, self.exp_avg, self.exp_avg_sq} == {"float32"} and not self.host_share

    def format_of(self, moment: str) -> StateFormat:
        return FORMATS[moment][getattr(self, moment)]


@dataclass(frozen=True, slots=True)
class Hyperparameters:
    """Hyperparameters of one step.

    ``step`` counts from 1. Gradients are multiplied by ``gradient_factor`` first. Weight decay is applied to
    the weights if ``decoupled`` (AdamW), otherwise added to the gradient.
    """

    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    step: int
    decoupled: bool = True
    gradient_factor: float = 1.0


@dataclass(frozen=True, slots=True)
class Shard:
    """A rank's shard of a parameter, or a part of it. All tensors are flat.

    Attributes:
        name: name of the parameter, equal for its copies on other ranks.
        first: index of the shard's first element in the parameter.
        weights: [n], the tensor with which the model computes.
        gradient: [n].
        moments: stored tensor of each moment, by name.
        master: [n] float32; None if ``weights`` themselves are stepped.
        is_early: the gradient was copied to host memory before the step.
    """

    name: str
    first: int
    weights: torch.Tensor
    gradient: torch.Tensor
    moments: Mapping[str, torch.Tensor]
    master: torch.Tensor | None
    is_early: bool = False


@torch.no_grad()
def step_shard(shard: Shard, settings: StateSettings, parameters: Hyperparameters) -> None:
    """Step the weights and the optimizer state of a shard in place. All tensors must be on one device."""
    count, stepped = shard.weights.numel(), shard.weights if shard.master is None else shard.master
    # The slice size is a multiple of BLOCK, so no block of 8-bit numbers is split over two slices.
    slice_size = SLICES[shard.weights.device.type]
    for first in range(0, count, slice_size):
        last = min(first + slice_size, count)
        # float() does not copy a float32 tensor, so the step writes to the stored weights directly.
        weights = stepped[first:last].float()
        gradient = shard.gradient[first:last].float()
        if parameters.gradient_factor != 1.0:
            # Not in place: a float32 gradient was not copied above, and is part of the gradient buffer of
            # data parallelism.
            gradient = gradient * parameters.gradient_factor
        step_slice(shard, settings, parameters, first, last, weights, gradient)
        if shard.master is not None:
            shard.weights[first:last].copy_(weights)
        elif shard.weights.dtype is not torch.float32:
            # Use other random bits than the moments, or their rounding errors would be correlated.
            key = f"{_key(shard, settings, parameters)} weights"
            bits = random_bits(key, shard.first + first, last - first, weights.device).bitwise_and_(_HALF)
            FORMATS["master"]["bfloat16"].write(shard.weights, first, weights, bits)


def step_slice(
    shard: Shard,
    settings: StateSettings,
    parameters: Hyperparameters,
    first: int,
    last: int,
    weights: torch.Tensor,
    gradient: torch.Tensor,
) -> None:
    """Step elements ``first`` to ``last`` of a shard: ``weights`` in place, and the moments in their stored
    form.

    ``weights`` and ``gradient`` contain only these elements, [last - first] float32.
    """
    moments = {
        name: settings.format_of(name).read(stored, first, last) for name, stored in shard.moments.items()
    }
    # Use torch's functional form: these slices of the state belong to no torch optimizer.
    update = adamw if parameters.decoupled else adam
    update(
        [weights],
        [gradient],
        [moments["exp_avg"]],
        [moments["exp_avg_sq"]],
        [],
        # torch's kernel increments the step before using it.
        [torch.full((), float(parameters.step - 1), device=weights.device)],
        amsgrad=False,
        beta1=parameters.betas[0],
        beta2=parameters.betas[1],
        lr=parameters.lr,
        weight_decay=parameters.weight_decay,
        eps=parameters.eps,
        maximize=False,
        foreach=False,
        capturable=False,
        differentiable=False,
        fused=True,
    )
    # In float32, both moments were views of the stored tensors, which are stepped already.
    if settings.exp_avg == settings.exp_avg_sq == "float32":
        return
    # The random bits depend on the position in the parameter, not on how it is sharded or sliced.
    bits = random_bits(_key(shard, settings, parameters), shard.first + first, last - first, weights.device)
    # Give each moment half of the 32 random bits. With equal bits their rounding errors would be correlated.
    halves = {"exp_avg": bits & _HALF, "exp_avg_sq": (bits >> 16).bitwise_and_(_HALF)}
    for name, stored in shard.moments.items():
        settings.format_of(name).write(stored, first, moments[name], halves[name])


def _key(shard: Shard, settings: StateSettings, parameters: Hyperparameters) -> str:
    return f"{settings.seed} {parameters.step} {shard.name}"


class LowPrecisionAdamW(torch.optim.AdamW):
    """``torch.optim.AdamW`` with other storage formats. ``state_dict`` and ``load_state_dict`` use float32,
    like torch's, and saved values are restored exactly.

    Args:
        params, options: arguments of ``torch.optim.AdamW``.
        decoupled: False adds weight decay to the gradient, as ``torch.optim.Adam`` does.

    Attributes:
        settings: storage formats; set before the first step.
        place_of: function of a parameter that returns its name and the index of this rank's first element in
            it.
        host_part: number of elements per parameter, from the start of this rank's shard, whose optimizer
            state is in host memory.
        host_zeros: allocates zeros in host memory with the shape and dtype of a given tensor.
    """

    settings = StateSettings()
    place_of: Callable[[torch.Tensor], tuple[str, int]]
    host_part: Mapping[torch.Tensor, int] = MappingProxyType({})
    host_zeros: Callable[[torch.Tensor], torch.Tensor]

    def __init__(self, params: Iterable[Any], *, decoupled: bool = True, **options: Any) -> None:
        super().__init__(params, **options)
        self.decoupled = decoupled

    def initialize_state(self, parameter: torch.Tensor) -> None:
        """Create the optimizer state of a parameter unless it exists: zero moments, and a float32 master copy
        if the settings require one."""
        if self.state[parameter]:
            return
        weights = local_shard(parameter)
        state: dict[str, torch.Tensor] = {}
        for prefix, first, last in self._pieces(parameter):
            # Create the tensors on the meta device first: host memory is then allocated by shape, from
            # page-locked blocks.
            outlines = {
                name: self.settings.format_of(name).zeros(last - first, torch.device("meta"))
                for name in MOMENTS
            }
            copied = self.settings.master == "float32" and weights.dtype is not torch.float32
            # State in host memory always has a master copy: the CPU steps it, and only the result is copied
            # to the device.
            if copied or prefix:
                outlines[MASTER] = torch.empty(last - first, device="meta")
            for name, outline in outlines.items():
                device = weights.device
                state[prefix + name] = (
                    self.host_zeros(outline) if prefix else torch.zeros_like(outline, device=device)
                )
        self.state[parameter] = state
        self._copy_weights(parameter)

    def _pieces(self, parameter: torch.Tensor) -> list[tuple[str, int, int]]:
        """Split a shard by the memory of its optimizer state. Return key prefix, first and last element of
        each part."""
        count, kept = local_shard(parameter).numel(), self.host_part.get(parameter, 0)
        pieces = [(HOST, 0, kept), ("", kept, count)]
        # An empty shard has one empty part, so that its state has the same keys as on other ranks.
        return [piece for piece in pieces if piece[1] < piece[2]] or pieces[1:]

    def _copy_weights(self, parameter: torch.Tensor) -> None:
        """Copy the weights to their float32 master copies. Call this after writing to the weights
        directly."""
        weights, state = local_shard(parameter), self.state[parameter]
        for prefix, first, last in self._pieces(parameter):
            if prefix + MASTER in state:
                state[prefix + MASTER].copy_(weights[first:last])

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Take one step. Parameters without a gradient are not changed."""
        for group in self.param_groups:
            for parameter in group["params"]:
                gradient = gradient_of(parameter)
                if gradient is not None:
                    self.initialize_state(parameter)
                    # A tensor, as in torch's AdamW: checkpoints and load_state_dict expect one.
                    step = self.state[parameter].setdefault("step", torch.zeros(()))
                    step += 1
                    for shard, numbers, _ in self.shards(parameter, local_shard(gradient), group, int(step)):
                        step_shard(shard, self.settings, numbers)

    def shards(
        self,
        parameter: torch.Tensor,
        gradient: torch.Tensor,
        group: Mapping[str, Any],
        step: int,
        factor: float = 1.0,
    ) -> Iterator[tuple[Shard, Hyperparameters, bool]]:
        """Yield the parts of a parameter's shard, each with the hyperparameters of the step and a flag that
        is True if the part's optimizer state is in host memory. The state must exist.

        Args:
            parameter: a parameter of ``group``.
            gradient: gradient of this rank's shard, flat.
            group: parameter group with the hyperparameters.
            step: number of the step, from 1.
            factor: number by which the gradient is multiplied first.
        """
        state, weights = self.state[parameter], local_shard(parameter)
        name, offset = self.place_of(parameter)
        lr, betas, eps, decay = float(group["lr"]), tuple(group["betas"]), group["eps"], group["weight_decay"]
        numbers = Hyperparameters(lr, betas, eps, decay, step, self.decoupled, factor)
        for prefix, first, last in self._pieces(parameter):
            moments = {moment: state[prefix + moment] for moment in MOMENTS}
            own = weights[first:last], gradient[first:last]
            yield (
                Shard(name, offset + first, *own, moments, state.get(prefix + MASTER)),
                numbers,
                bool(prefix),
            )

    def read_state(self, parameter: torch.Tensor, name: str) -> torch.Tensor:
        """Return one state (``param``, the master weights, or a moment) of this rank's shard as [n] float32.
        A state that is stored as a single float32 tensor is returned itself, any other as a copy."""
        found = [self._read(parameter, name, *piece) for piece in self._pieces(parameter)]
        return found[0] if len(found) == 1 else torch.cat([part.cpu() for part in found])

    def _read(self, parameter: torch.Tensor, name: str, prefix: str, first: int, last: int) -> torch.Tensor:
        state = self.state[parameter]
        if name == "param":
            values: torch.Tensor = state.get(prefix + MASTER, local_shard(parameter)[first:last])
            return values.float()
        return self.settings.format_of(name).read(state[prefix + name], 0, last - first)

    def write_state(self, parameter: torch.Tensor, name: str, values: torch.Tensor) -> None:
        """Store the values of one state (``param`` or a moment), rounded to nearest."""
        state = self.state[parameter]
        for prefix, first, last in self._pieces(parameter):
            if name == "param":
                state.get(prefix + MASTER, local_shard(parameter)[first:last]).copy_(values[first:last])
            else:
                stored = state[prefix + name]
                self.settings.format_of(name).write(stored, 0, values[first:last].to(stored.device), None)

    def full_state(self) -> dict[torch.Tensor, dict[str, torch.Tensor]]:
        """Return the state in the form of ``torch.optim.AdamW``: float32 moments with the parameter's
        shape."""
        full: dict[torch.Tensor, dict[str, torch.Tensor]] = {}
        for parameter, state in self.state.items():
            full[parameter] = {"step": state["step"]}
            for name in MOMENTS:
                full[parameter][name] = self._like(parameter, self.read_state(parameter, name))
        return full

    @staticmethod
    def _like(parameter: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        if not isinstance(parameter, DTensor):
            return values.view(parameter.shape)
        local, mesh, placements = (
            values.view(parameter.to_local().shape),
            parameter.device_mesh,
            parameter.placements,
        )
        # Pass shape and stride: from_local assumes equal shards, and derives wrong values from uneven ones.
        return DTensor.from_local(
            local, mesh, placements, run_check=False, shape=parameter.shape, stride=parameter.stride()
        )

    def state_dict(self) -> StateDict:
        kept = self.state
        try:
            # torch's state_dict reads self.state and numbers the parameters. Swap the state for the call,
            # rather than repeat this numbering.
            self.state = self.full_state()  # type: ignore[assignment]
            return super().state_dict()
        finally:
            self.state = kept

    @torch.no_grad()
    def load_state_dict(self, state_dict: StateDict) -> None:
        # Load the state separately: torch would convert the moments of bfloat16 weights to bfloat16.
        super().load_state_dict({**state_dict, "state": {}})
        parameters, numbers = [], []
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            parameters += group["params"]
            numbers += saved["params"]
        # Empty the state first, because initialize_state skips a parameter that has one.
        self.state = type(self.state)(dict)
        for number, parameter in zip(numbers, parameters, strict=True):
            if number not in state_dict["state"]:
                continue
            values = state_dict["state"][number]
            self.initialize_state(parameter)
            self.state[parameter]["step"] = values["step"].detach().cpu().float().clone()
            for name in MOMENTS:
                self.write_state(parameter, name, local_shard(values[name]))


SUM = "decoupled_grad"
"""Attribute of a parameter for its accumulated float32 gradient. torch requires ``grad`` to have the
parameter's dtype. Megatron-Core uses the same name."""


def gradient_of(parameter: torch.Tensor) -> torch.Tensor | None:
    """Return the gradient for the step: the accumulated float32 gradient if there is one, otherwise ``grad``,
    which may be None."""
    found = getattr(parameter, SUM, None)
    return parameter.grad if found is None else found


@torch.no_grad()
def add_to_sum(parameter: torch.Tensor) -> None:
    """Add a parameter's ``grad`` to its accumulated float32 gradient, and set ``grad`` to None."""
    assert parameter.grad is not None
    gradient = parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else parameter.grad
    found = getattr(parameter, SUM, None)
    if found is None:
        setattr(parameter, SUM, gradient.float())
    else:
        found.add_(gradient)
    parameter.grad = None


def local_shard(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard of a tensor as a flat view."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach().view(-1)
