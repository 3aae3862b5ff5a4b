"""Backend of a policy, and kind of its model, as a ``policy`` section defines them."""

from __future__ import annotations

from typing import Literal, TypeAlias

from packaging.version import Version

from megarl.config.generation import GenerationConfig
from megarl.config.policy import PolicyConfig
from megarl.errors import Violation

BackendName: TypeAlias = Literal["megatron", "dtensor", "fsdp1"]
HAS_HYBRID_MODEL = Version("0.19.2")
"""First release of Megatron-Core whose HybridModel megarl supports."""


def enabled_backend(policy: PolicyConfig) -> BackendName:
    """Return the backend of a ``policy`` section: ``megatron`` or ``dtensor`` if its section is enabled,
    otherwise ``fsdp1``."""
    # Use get, because a policy section that a program constructs may lack either.
    megatron, dtensor = policy.get("megatron_cfg"), policy.get("dtensor_cfg")
    if megatron and megatron["enabled"]:
        return "megatron"
    return "dtensor" if dtensor and dtensor["enabled"] else "fsdp1"


def generation_of(policy: PolicyConfig) -> GenerationConfig:
    """Return ``policy.generation``. Call it only after defaults are filled in, and only in a run that
    generates, where the section is not null.

    Raises:
        ValueError: the section is null.
    """
    section = policy["generation"]
    if section is None:
        raise ValueError("policy.generation is null, so that nothing can be generated; write a section")
    return section


def scores(policy: PolicyConfig) -> bool:
    """Return whether a ``policy`` section describes a reward model or critic, which has a scalar score head
    in place of a language model's output layer."""
    section = policy.get("reward_model_cfg")
    return section is not None and bool(section.get("enabled"))


def absent_hybrid_model(key: str, version: str) -> Violation | None:
    """Return a violation if this Megatron-Core release lacks the HybridModel that a key requests, else None.

    Args:
        key: dotted key whose value is ``hybrid``.
        version: installed version of Megatron-Core.
    """
    if Version(version) >= HAS_HYBRID_MODEL:
        return None
    fix = f"write gpt or null, or install megatron-core {HAS_HYBRID_MODEL} or newer, for Python 3.12"
    return Violation(key, "hybrid", f"Megatron-Core {version} has no HybridModel", fix)
