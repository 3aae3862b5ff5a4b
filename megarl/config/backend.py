"""The backend that a policy runs on, and the kind of its model."""

from __future__ import annotations

from typing import Literal, TypeAlias

from packaging.version import Version

from megarl.config.generation import GenerationConfig
from megarl.config.policy import PolicyConfig
from megarl.errors import Violation

BackendName: TypeAlias = Literal["megatron", "dtensor", "fsdp1"]
HAS_HYBRID_MODEL = Version("0.19.2")
"""First release of Megatron-Core whose HybridModel is supported."""


def enabled_backend(policy: PolicyConfig) -> BackendName:
    """``megatron``, ``dtensor`` or, with neither enabled, ``fsdp1``."""
    megatron, dtensor = policy.get("megatron_cfg"), policy.get("dtensor_cfg")
    if megatron and megatron["enabled"]:
        return "megatron"
    return "dtensor" if dtensor and dtensor["enabled"] else "fsdp1"


def generation_of(policy: PolicyConfig) -> GenerationConfig:
    """The ``generation`` section of the filled-in policy section of a run that generates."""
    section = policy["generation"]
    if section is None:
        raise ValueError("policy.generation is null, so that nothing can be generated; write a section")
    return section


def scores(policy: PolicyConfig) -> bool:
    """Return whether a policy section asks for a model that scores, with one output in the place of a
    language model's output layer."""
    section = policy.get("reward_model_cfg")
    return section is not None and bool(section.get("enabled"))


def absent_hybrid_model(key: str, version: str) -> Violation | None:
    """Return why the model class at ``key`` cannot be ``hybrid`` with a version of Megatron-Core, or None."""
    if Version(version) >= HAS_HYBRID_MODEL:
        return None
    fix = f"write gpt or null, or install megatron-core {HAS_HYBRID_MODEL} or newer, for Python 3.12"
    return Violation(key, "hybrid", f"Megatron-Core {version} has no HybridModel", fix)
