"""Adam with decoupled weight decay (Loshchilov and Hutter, arXiv:1711.05101) on states that are stored in
fewer bits.

The arithmetic is float32, by torch's fused kernel, on a slice of a shard at a time: states are read from
their formats, stepped, and stored again with stochastic rounding (``state_formats``). Memory is that of the
stored states and of one slice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim.adam import adam
from torch.optim.adamw import adamw

from megarl.models.engine.state_formats import BLOCK, FORMATS, StateFormat, random_bits

MOMENTS = ("exp_avg", "exp_avg_sq")
MASTER = "master_param"
SLICES = {"cpu": BLOCK * 2**8, "cuda": BLOCK * 2**14}
"""Numbers that are stepped at a time: on a CPU such as stay in its caches."""
_HALF = 0xFFFF


@dataclass(frozen=True, slots=True)
class StateSettings:
    """Formats of the states of one optimizer.

    Attributes:
        master: ``float32`` keeps float32 copies of 16-bit weights; ``bfloat16`` steps the weights
        themselves, with stochastic rounding. exp_avg, exp_avg_sq: formats of the two moments. seed: of the
        rounding.
    """

    master: str = "float32"
    exp_avg: str = "float32"
    exp_avg_sq: str = "float32"
    seed: int = 0

    @classmethod
    def of(cls, chosen: Mapping[str, object], seed: int) -> StateSettings | None:
        """Read the keys ``*_dtype`` of an optimizer's section; None where all are float32."""
        names = {name: str(chosen.get(f"{name}_dtype", "float32")) for name in ("master", *MOMENTS)}
        return None if set(names.values()) == {"float32"} else cls(**names, seed=seed)

    def format_of(self, moment: str) -> StateFormat:
        return FORMATS[moment][getattr(self, moment)]


@dataclass(frozen=True, slots=True)
class Hyperparameters:
    """Numbers of one step. ``step`` counts from 1; gradients are multiplied by ``gradient_factor`` first."""

    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    step: int
    decoupled: bool = True
    gradient_factor: float = 1.0


@dataclass(frozen=True, slots=True)
class Shard:
    """A rank's part of a parameter, all tensors flat.

    Attributes:
        name: of the parameter; copies of it on other ranks have the same.
        first: position of the shard in the parameter.
        weights: [n], as the model computes with them.
        gradient: [n].
        moments: storage of each.
        master: [n] float32, or None where ``weights`` are stepped themselves.
    """

    name: str
    first: int
    weights: torch.Tensor
    gradient: torch.Tensor
    moments: Mapping[str, torch.Tensor]
    master: torch.Tensor | None


@torch.no_grad()
def step_shard(shard: Shard, settings: StateSettings, parameters: Hyperparameters) -> None:
    """Step weights and states of a shard in place."""
    update = adamw if parameters.decoupled else adam
    count, device, stepped = shard.weights.numel(), shard.weights.device, shard.weights if shard.master is None else shard.master
    counter = torch.full((), float(parameters.step - 1), device=device)
    key = f"{settings.seed} {parameters.step} {shard.name}"
    for first in range(0, count, SLICES[device.type]):
        last = min(first + SLICES[device.type], count)
        weights = stepped[first:last].float()
        moments = {name: settings.format_of(name).read(stored, first, last) for name, stored in shard.moments.items()}
        gradient = shard.gradient[first:last].float()
        if parameters.gradient_factor != 1.0:
            gradient = gradient * parameters.gradient_factor
        update(
            [weights],
            [gradient],
            [moments["exp_avg"]],
            [moments["exp_avg_sq"]],
            [],
            [counter.clone()],
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
        bits = random_bits(key, shard.first + first, last - first, device)
        halves = {"exp_avg": bits & _HALF, "exp_avg_sq": (bits >> 16).bitwise_and_(_HALF)}
        for name, stored in shard.moments.items():
            settings.format_of(name).write(stored, first, moments[name], halves[name])
        if shard.master is not None:
            shard.weights[first:last].copy_(weights)
        elif shard.weights.dtype is not torch.float32:
            own = random_bits(f"{key} weights", shard.first + first, last - first, device).bitwise_and_(_HALF)
            FORMATS["master"]["bfloat16"].write(shard.weights, first, weights, own)


class LowPrecisionAdamW(torch.optim.AdamW):
    """``torch.optim.AdamW`` whose states have other formats. ``state_dict`` and ``load_state_dict`` have
    them in float32, as it does; values that were saved come back as they were.

    Args:
        params, options: as of ``torch.optim.AdamW``.
        decoupled: False adds weight decay to the gradient, as ``torch.optim.Adam``.

    Attributes:
        settings: how states are stored; set before the first step.
        place_of: the name of a parameter, and the position of its shard.
    """

    settings = StateSettings()
    place_of: Callable[[torch.Tensor], tuple[str, int]]

    def __init__(self, params: Iterable[Any], *, decoupled: bool = True, **options: Any) -> None:
        super().__init__(params, **options)
        self.decoupled = decoupled

    def initialize_state(self, parameter: torch.Tensor) -> None:
        """Give ``parameter`` its moments, both zero, and a float32 copy where the settings want one, if it
        has none."""
        if self.state[parameter]:
            return
        weights = local_shard(parameter)
        state: dict[str, Any] = {name: self.settings.format_of(name).zeros(weights.numel(), weights.device) for name in MOMENTS}
        if self.settings.master == "float32" and weights.dtype is not torch.float32:
            state[MASTER] = weights.float()
        self.state[parameter] = state

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """One update from the gradients now in ``.grad``; parameters without one are left alone."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.initialize_state(parameter)
                    step = self.state[parameter].setdefault("step", torch.zeros(()))
                    step += 1
                    self.step_parameter(parameter, local_shard(parameter.grad), group, int(step))

    def step_parameter(
        self, parameter: torch.Tensor, gradient: torch.Tensor, group: Mapping[str, Any], step: int, factor: float = 1.0
    ) -> None:
        """Step one parameter, which has its state.

        Args:
            parameter: of ``group``.
            gradient: flat, of this rank's shard.
            group: hyperparameters.
            step: number of the step, from 1.
            factor: that the gradient is multiplied by first.
        """
        state = self.state[parameter]
        name, first = self.place_of(parameter)
        moments = {moment: state[moment] for moment in MOMENTS}
        shard = Shard(name, first, local_shard(parameter), gradient, moments, state.get(MASTER))
        lr, betas, eps, decay = float(group["lr"]), tuple(group["betas"]), group["eps"], group["weight_decay"]
        step_shard(shard, self.settings, Hyperparameters(lr, betas, eps, decay, step, self.decoupled, factor))

    def read_state(self, parameter: torch.Tensor, name: str) -> torch.Tensor:
        """Return the values of a state of this rank's shard, [n] float32: ``param`` or a moment. Those
        stored so are no copies."""
        if name == "param":
            return self.state[parameter].get(MASTER, local_shard(parameter)).float()
        stored = self.state[parameter][name]
        return self.settings.format_of(name).read(stored, 0, local_shard(parameter).numel())

    def write_state(self, parameter: torch.Tensor, name: str, values: torch.Tensor) -> None:
        """Store the values of a state, rounded to the nearest."""
        if name == "param":
            self.state[parameter].get(MASTER, local_shard(parameter)).copy_(values)
        else:
            self.settings.format_of(name).write(self.state[parameter][name], 0, values, None)

    def full_state(self) -> dict[torch.Tensor, dict[str, Any]]:
        """Return the state as ``torch.optim.AdamW`` has it: moments in float32 with the parameter's shape."""
        return {
            parameter: {"step": state["step"], **{name: self._like(parameter, self.read_state(parameter, name)) for name in MOMENTS}}
            for parameter, state in self.state.items()
        }

    @staticmethod
    def _like(parameter: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        if not isinstance(parameter, DTensor):
            return values.view(parameter.shape)
        local, mesh, placements = values.view(parameter.to_local().shape), parameter.device_mesh, parameter.placements
        return DTensor.from_local(local, mesh, placements, run_check=False, shape=parameter.shape, stride=parameter.stride())

    def state_dict(self) -> dict[str, Any]:
        kept = self.state
        try:
            self.state = self.full_state()  # type: ignore[assignment]
            return super().state_dict()
        finally:
            self.state = kept

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        loaded, self.state = self.state, type(self.state)(dict)
        for parameter in list(loaded):
            # one after the other, so that both forms of all are never there at once
            values = loaded.pop(parameter)
            self.initialize_state(parameter)
            self.state[parameter]["step"] = values["step"].detach().cpu().float().clone()
            for name in MOMENTS:
                self.write_state(parameter, name, local_shard(values[name]))


def local_shard(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor, flat; a view."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach().view(-1)
