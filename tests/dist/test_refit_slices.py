"""Refits of which each rank of an engine is handed the slices that it reads: out of its policy rank's own
shard, with the export's bits."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from benchmarks.cases.messages import slices_read
from converters.checkpoint.source import open_source
from converters.families.read import read_architecture
from converters.mapping.rules import all_rules
from converters.mapping.shards import load_shard
from megarl.models.megatron.weight_stream import assembly_of, is_cut_alike, layouts_of
from megarl.parity.pool import WorkerPool
from megarl.weight_sync.manifest import Manifest
from megarl.weight_sync.plan import padded_bytes
from megarl.weight_sync.slices import Slice
from tests.dist import refit_jobs
from tests.dist.test_refit import BUDGET, configured, stored
from tests.models import make_tiny
from tests.tiers import sampled, slow

# family, ranks, layout, ranks of an engine
DENSE: dict[str, tuple[str, int, dict[str, Any], int]] = {
    "tp2": ("qwen3", 2, {"tp": 2}, 2),
    "tp2-sp-tied": ("qwen3-tied", 2, {"tp": 2, "sp": True, "multiple": 2}, 2),
    "tp2-pp2-biases": ("qwen2", 4, {"tp": 2, "pp": 2}, 2),
    "tp2-dp2": ("llama", 4, {"tp": 2}, 2),
    "two-for-one": ("qwen3", 2, {}, 2),
    "one-for-two-stages": ("qwen3", 2, {"pp": 2}, 2),
}
# bytes of a shard of a matrix of it: 51 rows of 36 numbers. It is not cut alike: vLLM pads 101 rows to 128,
# Megatron to 102
OF_VOCABULARY = 51 * 36 * 4


def model_of(directory: Path, family: str) -> Path:
    name, _, tied = family.partition("-")
    return make_tiny(directory / family, name, tied=bool(tied), seed=5, layers=4)


def wanted_of(model: Path, ranks: int, experts: int = 0) -> tuple[dict[str, Slice], ...]:
    return slices_read(Manifest.of(iter(stored(model).items())), 2, ranks, experts)


def check(results: list[dict[str, Any]], wanted: Sequence[Mapping[str, Slice]]) -> None:
    """Each rank of an engine got what it reads and nothing else, with the export's bits, before and after a
    step of training."""
    for result in results:
        assert set(result["names"]) == {name for slices in wanted for name in slices}
        assert [seen["version"] for seen in result["refits"]] == [0, 1]
        assert all(seen["same"] for seen in result["refits"])
        assert result["whole_again"] and result["whole_again_names"] == []


@sampled(2)
@pytest.mark.parametrize("layout", DENSE)
def test_an_engine_s_rank_reads_slices_of_the_policy_s_weights_at_every_step(
    pool: WorkerPool, tmp_path: Path, layout: str
) -> None:
    family, world, changes, ranks = DENSE[layout]
    model = model_of(tmp_path, family)
    wanted = wanted_of(model, ranks)
    results = pool.run(
        world, refit_jobs.sliced_refits, configured("megatron", model, changes), wanted, BUDGET
    )
    check(results, wanted)
    for result in results:
        # what is not cut alike, and nothing else, is gathered from the tensor-parallel neighbour
        tensor = changes.get("tp", 1)
        expected = result["vocabularies"] * OF_VOCABULARY if tensor > 1 else 0
        assert all(seen["gathered"] == expected for seen in result["refits"])
        assert all(seen["gathered"] < seen["gathered_whole"] for seen in result["refits"]) or tensor == 1


@sampled(1)
@pytest.mark.parametrize(
    ("backend", "family", "world", "changes", "ranks"),
    [
        # an engine of more ranks than the policy, ranks that read one another's slices, and backends that
        # gather everything
        ("megatron", "qwen3", 2, {"tp": 2}, 4),
        pytest.param("dtensor", "qwen3", 2, {"tp": 2}, 2, marks=slow),
        pytest.param("fsdp1", "qwen3", 2, {}, 2, marks=slow),
    ],
    ids=["four-for-two", "dtensor", "fsdp1"],
)
def test_whole_weights_come_where_no_rank_has_what_is_read(
    pool: WorkerPool,
    tmp_path: Path,
    backend: str,
    family: str,
    world: int,
    changes: dict[str, Any],
    ranks: int,
) -> None:
    model = model_of(tmp_path, family)
    results = pool.run(
        world, refit_jobs.sliced_refits, configured(backend, model, changes), wanted_of(model, ranks), BUDGET
    )
    assert all(result["names"] == [] and result["whole_again"] for result in results)


SP = {"sp": True, "multiple": 2}
# family, ranks, layout, ranks of an engine, whether experts are divided over them, and the share of all
# experts that comes to a rank from others of its stage
EXPERTS: dict[str, tuple[str, int, dict[str, Any], int, bool, float]] = {
    "cut-alike": ("qwen3_moe_mixed", 2, {"etp": 2, "tp": 2, **SP}, 2, False, 0),
    "divided-alike": ("qwen3_moe_mixed", 2, {"ep": 2, "etp": 1, "tp": 2, **SP}, 2, True, 0),
    "divided-alike-data-parallel": ("qwen2_moe", 2, {"ep": 2}, 2, True, 0),
    "divided-alike-stages": ("mixtral", 4, {"ep": 2, "pp": 2}, 2, True, 0),
    "divided-and-cut": ("deepseek_v3", 2, {"ep": 2, "etp": 1, "tp": 2, **SP}, 2, False, 1 / 2),
    "divided-otherwise": ("glm4_moe", 4, {"ep": 4, "etp": 1, "tp": 2, **SP}, 2, True, 3 / 4),
    "cut-and-divided": ("deepseek_v3", 2, {"etp": 2, "tp": 2, **SP}, 2, True, 1 / 2),
    "divided-more": ("qwen3_moe_mixed", 4, {"ep": 2, "etp": 2, "tp": 2, **SP}, 4, True, 1 / 4),
    "divided-in-rounds": ("qwen3_moe_mixed", 2, {"ep": 2, "etp": 1, "tp": 2, **SP}, 2, False, 1 / 2),
    "stored-together": ("gpt_oss", 2, {"ep": 2, "etp": 1, "tp": 2, **SP}, 2, True, 1 / 2),
}


@sampled(3)
@pytest.mark.parametrize("layout", EXPERTS)
def test_experts_go_to_the_ranks_that_read_them(pool: WorkerPool, tmp_path: Path, layout: str) -> None:
    family, world, changes, ranks, divided, share = EXPERTS[layout]
    model = make_tiny(tmp_path / "model", family, tied=False, seed=5, layers=4)
    weights = stored(model)
    experts = 1 + max(
        (int(found[1]) for name in weights if (found := re.search(r"experts\.(\d+)\.", name))), default=0
    )
    wanted = wanted_of(model, ranks, experts if divided else 0)
    if family == "gpt_oss":
        wanted = tuple({**slices, **together_of(weights, rank, ranks)} for rank, slices in enumerate(wanted))
    budget = max(BUDGET, *(padded_bytes(tensor.nbytes) for tensor in weights.values()))
    config = configured("megatron", model, changes)
    if layout == "divided-in-rounds":
        # a sixteenth of it has room for two of the four rounds of a layer
        config["refit_buffer_size_gb"] = 16 * 40_000 / 2**30
    results = pool.run(world, refit_jobs.sliced_refits, config, wanted, budget)
    check(results, wanted)
    for result in results:
        assert all(
            seen["experts_gathered"] == share * seen["experts"] and seen["experts"] > 0
            for seen in result["refits"]
        )


def together_of(weights: Mapping[str, torch.Tensor], rank: int, ranks: int) -> dict[str, Slice]:
    """A rank's experts out of those of a layer."""
    stacks = {name: len(tensor) for name, tensor in weights.items() if ".experts." in name}
    return {name: Slice(0, rank * count // ranks, count // ranks) for name, count in stacks.items()}


# heads of queries and of keys, vocabulary, ranks, and the modules that are cut alike
SIZES: dict[str, tuple[int, int, int, int, set[str]]] = {
    "as-many-heads": (
        6,
        6,
        128,
        2,
        {
            "q_proj",
            "k_proj",
            "v_proj",
            "o_proj",
            "gate_proj",
            "up_proj",
            "down_proj",
            "embed_tokens",
            "lm_head",
        },
    ),
    "grouped": (
        12,
        3,
        192,
        3,
        {
            "q_proj",
            "k_proj",
            "v_proj",
            "o_proj",
            "gate_proj",
            "up_proj",
            "down_proj",
            "embed_tokens",
            "lm_head",
        },
    ),
    # two ranks read one key head, which Megatron-Core cuts in two
    "fewer-key-heads": (8, 2, 101, 4, {"o_proj", "gate_proj", "up_proj", "down_proj"}),
}


@pytest.mark.parametrize("sizes", SIZES)
def test_slices_out_of_one_shard_are_those_of_the_whole_weight(tmp_path: Path, sizes: str) -> None:
    heads, key_heads, vocabulary, ranks, alike = SIZES[sizes]
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=72,
        intermediate_size=ranks * 5,
        num_hidden_layers=1,
        num_attention_heads=heads,
        num_key_value_heads=key_heads,
        head_dim=10,
        tie_word_embeddings=False,
    )
    make_saved(config, tmp_path / "model")
    weights, source = stored(tmp_path / "model"), open_source(tmp_path / "model")
    wanted = slices_read(Manifest.of(iter(weights.items())), key_heads, ranks)
    architecture = read_architecture(config)
    padded = -(-vocabulary // ranks) * ranks
    found = set()
    for rule in all_rules(architecture):
        if not is_cut_alike(rule, layouts_of(rule, ranks, padded, architecture), wanted):
            continue
        for rank in range(ranks):
            shard = load_shard(rule, source, architecture, rank, ranks, padded)
            begins = [{rank: 0}, {rank: shard.numel()}]
            plan = assembly_of(
                [rule, rule], [shard.shape] * 2, ranks, architecture, slices=wanted[rank], begins=begins
            )
            # the same parameter twice, so that the second one does not lie at the beginning
            given = plan.tensors(torch.cat([shard.flatten(), shard.flatten()])[None])
            assert [name for name, _ in given] == 2 * [part.name for part in rule.parts]
            for name, tensor in given:
                where = wanted[rank].get(name)
                assert torch.equal(tensor, weights[name] if where is None else where.of(weights[name])), name
                found |= {name.split(".")[-2]} if where is not None else set()
    assert found == alike


def make_saved(config: LlamaConfig, directory: Path) -> None:
    from transformers import LlamaForCausalLM

    torch.manual_seed(7)
    LlamaForCausalLM(config).save_pretrained(directory)
