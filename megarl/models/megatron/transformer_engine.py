"""Decides whether this process can use Transformer Engine, by importing it.

Megatron-Core imports Transformer Engine and treats an ImportError as its absence. Any other error aborts the
import of Megatron-Core and with it the worker: a package without its torch extension raises RuntimeError, and
a library built for another torch or CUDA raises OSError. So ``find`` must run before Megatron-Core is
imported; it hides an unusable Transformer Engine from all later imports.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import sys
from dataclasses import dataclass
from functools import cache

import torch
import torch.distributed as dist

from megarl.config.adapters import adapters_of
from megarl.config.policy import PolicyConfig
from megarl.distributed.device import runtime, will_use_cuda
from megarl.errors import ConfigError, Violation

logger = logging.getLogger(__name__)
PACKAGE = "transformer_engine"
KEY = "policy.megatron_cfg.transformer_engine"
AUTO = "auto"
_WIDTH = 16


@dataclass(frozen=True, slots=True)
class Finding:
    """Result of the search for Transformer Engine.

    Attributes:
        reason: why this process cannot use it; None if it can.
        is_fault: True if it should work (installed, and this process computes on a GPU) but does not.
    """

    reason: str | None = None
    is_fault: bool = False


@cache
def find() -> Finding:
    """Import Transformer Engine, or hide it from this process if it cannot be used."""
    if importlib.util.find_spec(PACKAGE) is None:
        return Finding("it is not installed")
    # Hide it on a CPU, because its layers have only CUDA kernels.
    if not will_use_cuda():
        _hide()
        return Finding("this process computes on a CPU")
    try:
        importlib.import_module(f"{PACKAGE}.pytorch")
    # A mismatched library raises OSError or RuntimeError, not only ImportError.
    except Exception as error:
        _hide()
        return Finding(_told("it cannot be imported", error), is_fault=True)
    return Finding()


def _hide() -> None:
    """Make every later import fail as if Transformer Engine were not installed. Parts of it may already be
    imported."""
    for name in list(sys.modules):
        if name.split(".")[0] in (PACKAGE, f"{PACKAGE}_torch"):
            del sys.modules[name]
    # Python marks a module that must not be imported in this way, and then raises ModuleNotFoundError.
    sys.modules[PACKAGE] = None  # type: ignore[assignment]


def _told(what: str, error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{what} ({type(error).__name__}: {lines[0] if lines else 'no message'})"


@cache
def try_it() -> Finding:
    """Find Transformer Engine and, if it was imported, run one small layer forward and backward on this
    process's device.

    Libraries that load may still not match the device or its driver. The random-number state is preserved.
    """
    finding = find()
    if finding.reason is not None:
        return finding
    device = runtime().device
    try:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            layer = importlib.import_module(f"{PACKAGE}.pytorch").LayerNormLinear(
                _WIDTH, _WIDTH, params_dtype=torch.bfloat16, device=str(device)
            )
            layer(torch.ones(_WIDTH, _WIDTH, dtype=torch.bfloat16, device=device)).sum().backward()
        # A kernel failure is reported when the host synchronizes, not at the launch.
        runtime().synchronize()
    except Exception as error:
        return Finding(_told("a small layer of it fails on this device", error), is_fault=True)
    return Finding()


def uses_transformer_engine(policy: PolicyConfig, *, has_experts: bool) -> bool:
    """Return whether the policy's layers are Transformer Engine's.

    All ranks must agree, because ranks with different layers would wait for each other's collectives.
    Collective over the world, if it is initialised, unless the configuration rules Transformer Engine out.

    Args:
        policy: the policy configuration with defaults filled in.
        has_experts: the model is a mixture-of-experts model.

    Raises:
        ConfigError: the configuration requires Transformer Engine, but some rank cannot use it.
    """
    wanted = policy["megatron_cfg"]["transformer_engine"]
    if wanted is False or (wanted == AUTO and prefers_portable_layers(policy, has_experts=has_experts)):
        return False
    # The configuration is equal on all ranks, so all of them reach this collective or none.
    finding = try_it()
    on_all, on_any = _agreed(finding.reason is None)
    if on_all:
        return True
    if wanted is True:
        fix = (
            "megarl doctor (shows what is wrong), bash launch/gpu_environment.sh (installs a set that "
            "fits), or write auto or false"
        )
        reason = finding.reason or "it works on this rank but not on another; see the error of that rank"
        raise ConfigError([Violation(KEY, True, f"Transformer Engine cannot be used: {reason}", fix)])
    if finding.is_fault or (on_any and finding.reason is not None):
        whose = f"on rank {dist.get_rank()}, so no rank uses it" if dist.is_initialized() else "here"
        logger.warning("Transformer Engine cannot be used %s: %s. See: megarl doctor", whose, finding.reason)
    return False


def prefers_portable_layers(policy: PolicyConfig, *, has_experts: bool) -> bool:
    """Return whether ``auto`` should choose layers without Transformer Engine.

    Dense models in bfloat16 train faster without it: at 0.61 of the rate of a large matmul against 0.57 (1.5
    billion parameters on an H200, ``benchmarks/results/gpu``). Nothing else was measured. Adapters always
    need the portable layers.
    """
    if adapters_of(policy) is not None:
        return True
    return policy["precision"] == "bfloat16" and not has_experts


def _agreed(works: bool) -> tuple[bool, bool]:
    """Return whether ``works`` is True on all ranks, and whether it is on any. Collective over the world."""
    if not dist.is_initialized():
        return works, works
    # One MIN reduction computes both: the minimum of the negated values is minus their maximum.
    least = torch.tensor([int(works), -int(works)], device=runtime().device)
    dist.all_reduce(least, op=dist.ReduceOp.MIN)
    on_all, on_any = least.tolist()
    return on_all == 1, on_any == -1
