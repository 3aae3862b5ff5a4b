"""The memory plan, term by term, against bytes that are counted: tensors of real workers, and what hooks say
that autograd saves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.config.arithmetic import BatchPlan
from megarl.config.backend import enabled_backend
from megarl.config.layout import Layout
from megarl.config.memory import BYTES, RankMemory, estimate, estimate_sharded
from megarl.config.model_facts import read_model_facts
from megarl.config.validate import validate_policy_config
from megarl.parity.pool import WorkerPool
from tests.dist.batches import make_batch
from tests.dist.dtensor_jobs import dtensor_config
from tests.dist.fsdp1_jobs import fsdp1_config
from tests.dist.memory_jobs import terms_of_step
from tests.dist.peft_jobs import with_adapters
from tests.models import make_tiny, policy_config
from tests.tables import read_table
from tests.tiers import sampled

TABLES = read_table("memory_plan.yaml")

ROWS, LENGTH, VOCABULARY = 2, 240, 1009
WIDTHS = {
    "hidden_size": 96,
    "intermediate_size": 208,
    "max_position_embeddings": 256,
    "vocab_size": VOCABULARY,
}
CONFIGS = {"megatron": policy_config, "dtensor": dtensor_config, "fsdp1": fsdp1_config}
CASES: dict[str, tuple[str, str, dict[str, Any]]] = TABLES["cases"]


def planned(config: dict[str, Any], world: int) -> list[RankMemory]:
    """The plan of each pipeline stage of a step of two rows."""
    policy = validate_policy_config({**config, "generation": None}, world)
    facts = read_model_facts(policy["model_name"])
    assert facts is not None
    megatron, backend = policy["megatron_cfg"], enabled_backend(policy)
    tensor, stages = (megatron.get(f"{name}_model_parallel_size", 1) for name in ("tensor", "pipeline"))
    layout = Layout(stages, world // tensor // stages, 1, tensor, world)
    plan = BatchPlan(ROWS, 1, ROWS, layout.data, policy["train_micro_batch_size"], LENGTH)
    if backend == "megatron":
        return estimate(policy, facts, layout, plan, reference=False, device="cpu")
    return [estimate_sharded(policy, facts, layout, plan, reference=False)]


@sampled(6)
@pytest.mark.parametrize("case", CASES)
def test_each_term_is_what_is_counted(case: str, pool: WorkerPool, tmp_path: Path) -> None:
    """Within 2 %. Of what is planned for logits, hooks do not see the gradient of the output layer, which no
    forward pass keeps; and what is recomputed under torch's own checkpoints they do not see either."""
    backend, family, changes = CASES[case]
    changes = {"precision": "bfloat16", "mbs": ROWS, **changes}
    world = changes.pop("world", changes.get("tp", 1) * changes.get("pp", 1))
    model = make_tiny(tmp_path / "model", family, tied=False, layers=4, **WIDTHS)
    targets = changes.pop("targets", None)
    config = CONFIGS[backend](model, gbs=ROWS, max_length=LENGTH, **changes)
    if targets is not None:
        config = with_adapters(config, target_modules=targets)
    batch = make_batch(ROWS, LENGTH)
    batch["input_lengths"][:] = LENGTH
    batch |= {"token_mask": torch.ones(ROWS, LENGTH), "sample_mask": torch.ones(ROWS)}
    plans, element = planned(config, world), BYTES[config["precision"]]
    for rank, counted in enumerate(pool.run(world, terms_of_step, config, batch)):
        plan = plans[rank * len(plans) // world]
        columns = -(-VOCABULARY // changes.get("tp", 1)) if plan is plans[-1] else 0
        output = columns * WIDTHS["hidden_size"] * element
        logits = config["train_micro_batch_size"] * LENGTH * columns * element
        recomputed = plan.recomputed if backend == "megatron" else 0
        terms = {
            "held": plan.activations + max(plan.logits - output, recomputed),
            "without logits": plan.activations + max(plan.logits - output - logits, recomputed),
            "gradients": plan.gradients,
            "optimizer": plan.optimizer,
        }
        if backend == "megatron":
            terms["weights"] = plan.weights
        elif backend == "dtensor" and changes.get("torch_optimizer", {}).get("master_dtype"):
            # what is kept and stepped, without what a pass gathers
            terms["weights"] = 2 * plan.parameters
        if targets is not None:
            # autograd keeps less beside weights that are not trained than the plan has for them
            del terms["held"], terms["without logits"]
        assert {name: counted[name] for name in terms} == pytest.approx(terms, rel=0.02), (case, rank)
