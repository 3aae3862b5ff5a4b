"""The backend that a policy runs on, and the kind of its model."""

from __future__ import annotations

from typing import Literal, TypeAlias

from megarl.config.generation import GenerationConfig
from megarl.config.policy import PolicyConfig

BackendName: TypeAlias = Literal["megatron", "dtensor", "fsdp1"]


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
