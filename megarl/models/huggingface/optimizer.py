"""Optimizer and learning-rate schedule of the torch backends, given by import path and keyword arguments.

One-dimensional parameters (biases and norms) have their own parameter group, so that
``weight_decay_on_vectors: false`` can exclude them from weight decay, as Megatron does. The schedule counts
``train()`` calls.

Adam and AdamW use torch's fused kernel unless the configuration selects another: it makes one pass over the
state instead of a dozen operations per parameter. The kernels round differently, so a checkpoint records
which one wrote it, and a resumed run uses the same.
"""

from __future__ import annotations

import importlib
import inspect
import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NotRequired, TypedDict

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import ConstantLR, LRScheduler, ReduceLROnPlateau, SequentialLR
from torch.optim.optimizer import StateDict

from megarl.config.nested import at
from megarl.config.policy import PolicyConfig, PytorchOptimizerConfig
from megarl.config.rules.optimizer import milestone_faults
from megarl.errors import ConfigError, Violation
from megarl.key import defaults_of
from megarl.models.engine.backend import log_changed_rate
from megarl.models.engine.low_precision_adam import LowPrecisionAdamW, StateSettings, gradient_of

OPTIMIZER = "policy.optimizer"
SCHEDULER = "policy.scheduler"
# Optimizers that need more than dense gradients: a closure or sparse gradients.
UNSUITABLE = frozenset({"LBFGS", "SparseAdam"})
# Arguments that select a kernel, and the parameter-group key that records that the configuration selects
# none.
KERNEL_ARGUMENTS = frozenset({"foreach", "fused", "capturable", "differentiable"})
OPEN_KERNEL = "kernel_is_open"


class ScheduleSettings(TypedDict):
    """The learning rate and ``policy.scheduler``."""

    lr: float
    scheduler: object


class SavedSchedule(TypedDict):
    """A learning-rate schedule in a checkpoint. Version 0.1 did not save the settings, and had no ``kind``
    for a run without a schedule."""

    kind: str | None
    state: StateDict
    settings: NotRequired[ScheduleSettings]


def build_optimizer(
    policy: PolicyConfig,
    named_parameters: Iterable[tuple[str, torch.nn.Parameter]],
    dimensions: Mapping[str, int] | None = None,
    seed: int = 0,
) -> torch.optim.Optimizer:
    """Build the optimizer of ``policy.optimizer`` over all trainable parameters.

    Args:
        policy: the policy configuration. Its ``optimizer`` has ``name`` (import path), ``kwargs``,
            ``weight_decay_on_vectors`` and the dtypes of parameters and state.
        named_parameters: each parameter once.
        dimensions: number of dimensions of each full parameter, by name; needed if shards have another
            number.
        seed: seed of stochastic rounding for state below float32.

    Raises:
        ConfigError: the optimizer does not exist, or rejects an argument or a value.
    """
    chosen = {**defaults_of(PytorchOptimizerConfig), **(at(policy, "optimizer") or {})}
    if "name" not in chosen:
        raise _refusal(
            OPTIMIZER,
            policy["optimizer"],
            "a policy that trains needs an optimizer",
            "write {name: torch.optim.AdamW, kwargs: {lr: ...}}",
        )
    kind = _resolve(f"{OPTIMIZER}.name", chosen["name"], torch.optim.Optimizer, "torch.optim.AdamW")
    if kind.__name__ in UNSUITABLE:
        raise _refusal(
            f"{OPTIMIZER}.name",
            chosen["name"],
            "its step needs more than dense gradients",
            "write torch.optim.AdamW",
        )
    kwargs = dict(chosen.get("kwargs") or {})
    accepted = _check_arguments(OPTIMIZER, kind, kwargs, given={"params"})
    matrices: list[torch.nn.Parameter] = []
    vectors: list[torch.nn.Parameter] = []
    names: dict[torch.Tensor, str] = {}
    for name, parameter in named_parameters:
        if parameter.requires_grad:
            # Rounding is seeded by this name. It includes the shard index, because replicas of a shard must
            # be rounded alike.
            names[parameter] = f"{_shard_number(parameter)} {name}"
            count = parameter.ndim if dimensions is None else dimensions[name]
            (matrices if count > 1 else vectors).append(parameter)
    decays = chosen["weight_decay_on_vectors"] or "weight_decay" not in accepted
    # Only if the optimizer has this argument: others would reject the group.
    without_decay = {} if decays else {"weight_decay": 0.0}
    groups: list[dict[str, Any]] = [
        *([{"params": matrices}] if matrices else []),
        *([{"params": vectors, **without_decay}] if vectors else []),
    ]
    states = StateSettings(
        chosen["master_dtype"], chosen["exp_avg_dtype"], chosen["exp_avg_sq_dtype"], seed=seed
    )
    if not states.are_plain:
        # The configuration rules have already rejected other optimizers with such state formats.
        decoupled = kind is torch.optim.AdamW
        made = _construct(
            OPTIMIZER,
            LowPrecisionAdamW,
            groups,
            # Start from torch's default for each class; the user's kwargs override it.
            {"weight_decay": 1e-2 * decoupled, "decoupled": decoupled, **kwargs},
        )
        made.settings, made.place_of = states, lambda parameter: (names[parameter], 0)
        return made
    if kind in (torch.optim.Adam, torch.optim.AdamW) and all(
        kwargs.get(name) is None for name in KERNEL_ARGUMENTS
    ):
        for group in groups:
            # Store the choice in the group, which checkpoints contain, so that a run that began with another
            # kernel keeps it.
            group.update({"fused": True, OPEN_KERNEL: True})
    return _construct(OPTIMIZER, kind, groups, kwargs)


def _shard_number(parameter: torch.Tensor) -> int:
    """Return the index of this rank's shard of a parameter; replicas of a shard have the same index."""
    if isinstance(parameter, DTensor):
        return parameter.device_mesh.get_local_rank(0)
    return dist.get_rank() if dist.is_initialized() else 0


def build_scheduler(policy: PolicyConfig, optimizer: torch.optim.Optimizer) -> LRScheduler:
    """Build the learning-rate schedule of ``policy.scheduler``. Without one the learning rate is constant,
    but steps are still counted.

    ``{name, kwargs}`` is a single schedule. A list of schedules that ends with ``{milestones: [...]}`` is a
    sequence: at each milestone (a step) the next schedule takes over.

    Raises:
        ConfigError: a schedule does not exist or rejects an argument, or the milestones do not match.
    """
    chosen = policy["scheduler"]
    if not chosen:
        # Always create a schedule, because its step count is where a later schedule resumes.
        return ConstantLR(optimizer, factor=1.0, total_iters=1)
    if isinstance(chosen, Mapping):
        return _one_schedule(SCHEDULER, chosen, optimizer)
    entries, milestones = _split_milestones(chosen)
    schedules = [
        _one_schedule(f"{SCHEDULER}[{index}]", entry, optimizer) for index, entry in enumerate(entries)
    ]
    return schedules[0] if len(schedules) == 1 else SequentialLR(optimizer, schedules, milestones)


def saved_schedule(policy: PolicyConfig, scheduler: LRScheduler) -> SavedSchedule:
    """Return what ``resume_schedule`` needs from a checkpoint."""
    return {
        "kind": type(scheduler).__name__,
        "state": scheduler.state_dict(),
        "settings": _settings(policy, scheduler.optimizer),
    }


def resume_schedule(policy: PolicyConfig, scheduler: LRScheduler, saved: SavedSchedule) -> LRScheduler:
    """Return the schedule at a checkpoint's step. The optimizer state must already be loaded.

    A schedule with the checkpoint's settings gets the checkpoint's state, so that the run continues bit for
    bit. A schedule with other settings is stepped from 0 to the checkpoint's step.

    Args:
        policy: the current configuration, which decides the settings.
        scheduler: the schedule built from it.
        saved: the checkpoint's saved schedule.
    """
    optimizer = scheduler.optimizer
    settings, before = _settings(policy, optimizer), schedule_values(optimizer)["lr"]
    if saved["kind"] == type(scheduler).__name__ and saved.get("settings", settings) == settings:
        scheduler.load_state_dict(saved["state"])
        return scheduler
    for group in optimizer.param_groups:
        group["lr"] = settings["lr"]
        # torch takes the base rate of a new schedule from this key, and would use the checkpoint's.
        group.pop("initial_lr", None)
    resumed, steps = build_scheduler(policy, optimizer), saved["state"]["last_epoch"]
    with warnings.catch_warnings(
        action="ignore"
    ):  # torch expects an optimizer step between two steps of the schedule.
        for _ in range(steps):
            resumed.step()
    log_changed_rate(steps, before, schedule_values(optimizer)["lr"])
    return resumed


def _settings(policy: PolicyConfig, optimizer: torch.optim.Optimizer) -> ScheduleSettings:
    return {"lr": optimizer.defaults["lr"], "scheduler": policy["scheduler"] or None}


def schedule_values(optimizer: torch.optim.Optimizer) -> dict[str, float]:
    """Return ``lr`` and ``wd`` of the next optimizer step."""
    groups = optimizer.param_groups
    return {
        "lr": float(groups[0]["lr"]),
        "wd": max(float(group.get("weight_decay", 0.0)) for group in groups),
    }


def squared_norm(gradients: Iterable[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Return the sum of the squares of all elements, 0-d float64 on ``device``."""
    # float64, so that the norm is the same for every sharding.
    norms = [torch.linalg.vector_norm(gradient, dtype=torch.float64).to(device) for gradient in gradients]
    return torch.stack(norms).square().sum() if norms else torch.zeros((), dtype=torch.float64, device=device)


def local_gradients(parameters: Iterable[torch.nn.Parameter]) -> list[torch.Tensor]:
    """Return this rank's shards of the existing gradients."""
    gradients = []
    for parameter in parameters:
        gradient = gradient_of(parameter)
        if gradient is not None:
            gradients.append(gradient.to_local() if isinstance(gradient, DTensor) else gradient)
    return gradients


@torch.no_grad()
def global_norm(parameters: Iterable[torch.nn.Parameter], device: torch.device) -> float:
    """Return the L2 norm of the gradient over all ranks; the result is the same on all of them. Collective
    over all ranks.

    Args:
        parameters: parameters whose local shards this rank contributes; each element must be contributed by
            one rank.
        device: device for collectives.
    """
    total = squared_norm(local_gradients(parameters), device)
    # Sum over all ranks: exactly one rank contributes each element (see _counted).
    dist.all_reduce(total)
    return float(total.sqrt())


def clip(gradients: Iterable[torch.Tensor], norm: float, bound: float | None) -> None:
    """Scale gradients in place so that their joint norm, passed as ``norm``, is at most ``bound``. None or 0
    disables clipping."""
    if not bound:
        return
    factor = bound / (norm + 1e-6)  # torch.nn.utils.clip_grad_norm_ and Megatron add the same small number.
    if factor < 1.0:
        for gradient in gradients:
            gradient.mul_(factor)


# Defaults of torch's GradScaler: initial scale, growth factor, backoff factor, and growth interval in steps.
INITIAL = 2.0**16
GROWTH, BACKOFF, INTERVAL = 2.0, 0.5, 2000


@dataclass(slots=True)
class LossScale:
    """Factor of every loss in the backward pass, which keeps small float16 gradients from underflowing.

    Attributes:
        factor: the current factor; always 1 without scaling.
        dynamic: False for float32 and bfloat16, which have enough range.
        clean_steps: steps without overflow since the factor last changed.
    """

    factor: float = 1.0
    dynamic: bool = False
    clean_steps: int = 0

    @classmethod
    def for_float16(cls) -> LossScale:
        """Return a dynamic loss scale, which is halved at an overflow and doubled after ``INTERVAL`` steps
        without one."""
        return cls(INITIAL, dynamic=True)

    def accepts(self, norm: float) -> bool:
        """Return whether a step with this gradient norm may be taken, and update the factor for the next
        step. The norm must be the same on all ranks."""
        if not self.dynamic:
            return True
        if not math.isfinite(norm):
            # Never go below 1: if an unscaled loss overflows, scaling it down does not help.
            self.factor, self.clean_steps = max(1.0, self.factor * BACKOFF), 0
            return False
        self.clean_steps += 1
        if self.clean_steps == INTERVAL:
            self.factor, self.clean_steps = self.factor * GROWTH, 0
        return True


def _split_milestones(chosen: Sequence[Mapping[str, Any]]) -> tuple[list[Mapping[str, Any]], list[int]]:
    """Split the configured list into the schedules and the steps at which each next one takes over."""
    faults = list(milestone_faults(chosen))
    if faults:
        raise ConfigError(faults)
    entries = [entry for entry in chosen if "milestones" not in entry]
    return entries, list(chosen[-1].get("milestones", []))


def _one_schedule(key: str, chosen: Mapping[str, Any], optimizer: torch.optim.Optimizer) -> LRScheduler:
    kind = _resolve(f"{key}.name", chosen.get("name"), LRScheduler, "torch.optim.lr_scheduler.LinearLR")
    # It is an LRScheduler in newer torch, but its step requires a metric.
    if issubclass(kind, ReduceLROnPlateau):
        raise _refusal(
            f"{key}.name",
            chosen["name"],
            "it needs a metric at each step, but none is passed to it",
            "take another schedule",
        )
    kwargs = dict(chosen.get("kwargs") or {})
    _check_arguments(key, kind, kwargs, given={"optimizer"})
    return _construct(key, kind, optimizer, kwargs)


def _resolve(key: str, path: Any, base: type, example: str) -> Any:
    """Return the class at an import path.

    Raises:
        ConfigError: there is none, or it is not a subclass of ``base``.
    """
    module, _, name = str(path).rpartition(".")
    try:
        kind = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise _refusal(
            key,
            path,
            f"nothing can be imported under this name ({error})",
            f"write an import path such as {example}",
        ) from error
    if not (isinstance(kind, type) and issubclass(kind, base)) or kind is base:
        raise _refusal(key, path, f"it is no {base.__name__}", f"write an import path such as {example}")
    return kind


def _check_arguments(key: str, kind: type, kwargs: Mapping[str, object], given: set[str]) -> set[str]:
    """Check that ``kind`` has all arguments in ``kwargs``, and return the names of its arguments without
    those in ``given``.

    Raises:
        ConfigError: an argument is unknown.
    """
    parameters = inspect.signature(kind).parameters
    accepted = parameters.keys() - given
    # With **kwargs, every name is accepted here; the constructor itself refuses those that it does not know.
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return accepted | set(kwargs)
    unknown = [
        Violation(
            f"{key}.kwargs.{name}",
            kwargs[name],
            f"{kind.__name__} has no such argument",
            f"write one of {', '.join(sorted(accepted))}",
        )
        for name in kwargs
        if name not in accepted
    ]
    if unknown:
        raise ConfigError(unknown)
    return accepted


def _construct(key: str, kind: Any, first: Any, kwargs: Mapping[str, object]) -> Any:
    try:
        return kind(first, **kwargs)
    except (TypeError, ValueError, RuntimeError) as error:
        raise _refusal(
            f"{key}.kwargs", dict(kwargs), f"{kind.__name__} refuses them: {error}", "correct the arguments"
        ) from error


def _refusal(key: str, value: Any, bound: str, fix: str) -> ConfigError:
    return ConfigError([Violation(key, value, bound, fix)])
