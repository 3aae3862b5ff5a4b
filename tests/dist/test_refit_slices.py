"""Refits of which each rank of an engine is handed the slices that it reads: out of its policy rank's own shard, with the export's bits."""

from __future__ import annotations

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
from megarl.models.megatron.weight_stream import engine_ranks, is_cut_alike, layouts_of, slices_of
from megarl.weight_sync.manifest import Manifest
from megarl.weight_sync.slices import Slice
from tests.dist import refit_jobs
from tests.dist.pool import WorkerPool
from tests.dist.test_refit import BUDGET, configured, stored
from tests.models import make_tiny
from tests.tiers import sampled, slow

# family, ranks, layout, and the modules of which both sides are not cut alike: a vocabulary of 101 is padded to 128 by vLLM and to 102 here
DENSE: dict[str, tuple[str, int, dict[str, Any], set[str]]] = {
    "tp2": ("qwen3", 2, {"tp": 2}, {"embed_tokens", "lm_head"}),
    "tp2-sp-tied": ("qwen3-tied", 2, {"tp": 2, "sp": True, "multiple": 2}, {"embed_tokens"}),
    "tp2-pp2-biases": ("qwen2", 4, {"tp": 2, "pp": 2}, {"embed_tokens", "lm_head"}),
    "tp2-dp2": ("llama", 4, {"tp": 2}, {"embed_tokens", "lm_head"}),
}
# bytes of a shard of a matrix of it: 51 rows of 36 numbers
OF_VOCABULARY = 51 * 36 * 4


def model_of(directory: Path, family: str) -> Path:
    name, _, tied = family.partition("-")
    return make_tiny(directory / family, name, tied=bool(tied), seed=5, layers=4)


def wanted_of(model: Path, ranks: int) -> tuple[dict[str, Slice], ...]:
    return slices_read(Manifest.of(iter(stored(model).items())), 2, ranks)


@sampled(2)
@pytest.mark.parametrize("layout", DENSE)
def test_an_engine_s_rank_reads_slices_of_the_policy_s_weights_at_every_step(pool: WorkerPool, tmp_path: Path, layout: str) -> None:
    family, world, changes, elsewhere = DENSE[layout]
    model = model_of(tmp_path, family)
    wanted = wanted_of(model, 2)
    results = pool.run(world, refit_jobs.sliced_refits, configured("megatron", model, changes), wanted, BUDGET)
    expected = [name for name in stored(model) if name in wanted[0] and name.split(".")[-2] not in elsewhere]
    for result in results:
        assert sorted(result["names"]) == sorted(expected) and len(expected) >= 4 * 7
        assert [seen["version"] for seen in result["refits"]] == [0, 1]
        assert all(seen["same"] for seen in result["refits"])
        # what is not cut alike, and nothing else, is gathered from the tensor-parallel neighbour
        assert all(seen["gathered"] == result["vocabularies"] * OF_VOCABULARY < seen["gathered_whole"] for seen in result["refits"])
        assert result["whole_again"] and result["whole_again_names"] == []


@sampled(1)
@pytest.mark.parametrize(
    ("backend", "family", "world", "changes", "ranks"),
    [
        # more or fewer ranks of an engine than shards, ranks that read one another's slices, and backends that gather everything
        ("megatron", "qwen3", 2, {"tp": 2}, 4),
        ("megatron", "qwen3", 2, {}, 2),
        pytest.param("dtensor", "qwen3", 2, {"tp": 2}, 2, marks=slow),
        pytest.param("fsdp1", "qwen3", 2, {}, 2, marks=slow),
    ],
    ids=["four-for-two", "two-for-one", "dtensor", "fsdp1"],
)
def test_whole_weights_come_where_no_rank_has_what_is_read(
    pool: WorkerPool, tmp_path: Path, backend: str, family: str, world: int, changes: dict[str, Any], ranks: int
) -> None:
    model = model_of(tmp_path, family)
    results = pool.run(world, refit_jobs.sliced_refits, configured(backend, model, changes), wanted_of(model, ranks), BUDGET)
    assert all(result["names"] == [] and result["whole_again"] for result in results)


EXPERTS: dict[str, tuple[int, dict[str, Any], bool]] = {
    "etp2-tp2": (2, {"etp": 2, "tp": 2, "sp": True, "multiple": 2}, True),
    "ep2-tp2": (2, {"ep": 2, "etp": 1, "tp": 2, "sp": True, "multiple": 2}, False),
}


@sampled(1)
@pytest.mark.parametrize("layout", EXPERTS)
def test_experts_that_are_cut_alike_come_as_slices_and_divided_ones_whole(pool: WorkerPool, tmp_path: Path, layout: str) -> None:
    world, changes, sliced = EXPERTS[layout]
    model = make_tiny(tmp_path / "model", "qwen3_moe_mixed", tied=False, seed=5, layers=4)
    results = pool.run(world, refit_jobs.sliced_refits, configured("megatron", model, changes), wanted_of(model, 2), BUDGET)
    for result in results:
        assert any(".experts." in name for name in result["names"]) is sliced
        assert any("o_proj" in name for name in result["names"]) and all(seen["same"] for seen in result["refits"])


# heads of queries and of keys, vocabulary, ranks, and the modules that are cut alike
SIZES: dict[str, tuple[int, int, int, int, set[str]]] = {
    "as-many-heads": (
        6,
        6,
        128,
        2,
        {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "embed_tokens", "lm_head"},
    ),
    "grouped": (12, 3, 192, 3, {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "embed_tokens", "lm_head"}),
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
            plan = slices_of([rule, rule], [shard.shape, shard.shape], rank, ranks, architecture, wanted[rank])
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


@pytest.mark.parametrize(
    ("pairs", "size", "expected"),
    [
        ([(0, 0), (1, 1), (0, 0), (1, 1)], 2, [0, 1]),
        ([(0, 1), (1, 0)], 2, [1, 0]),
        ([(0, 0), (1, 1), (0, 2), (1, 3)], 2, []),
        ([(0, 0), (1, -1)], 2, []),
        ([(0, 0), (0, 0)], 1, [0]),
        ([(0, 0), (0, 1)], 1, []),
    ],
    ids=["replicas", "crossed", "twice-as-many", "nobody-beside", "one", "two-beside-one"],
)
def test_the_engine_s_rank_beside_each_shard_is_one_or_none(pairs: list[tuple[int, int]], size: int, expected: list[int]) -> None:
    assert engine_ranks(pairs, size) == expected
