"""Each key of ``vllm_cfg`` reaches the argument of vLLM that it is for, and nothing else changes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.config import complete_policy
from megarl.errors import ConfigError
from megarl.models.generation.engine_group import engine_places
from megarl.models.generation.vllm import plugin
from megarl.models.generation.vllm.configuration import fills_places
from megarl.models.generation.vllm.nodes import Part
from megarl.models.generation.vllm.options import CACHE_ON_A_CPU, completed, engine_options
from tests.unit.config_samples import changed, raw_grpo

VALUES: dict[str, tuple[Any, dict[str, Any]]] = {
    # vLLM's own processes: inside a Ray actor it would choose Ray
    "tensor_parallel_size": (2, {"tensor_parallel_size": 2, "distributed_executor_backend": plugin.EXECUTOR}),
    "pipeline_parallel_size": (
        2,
        {"pipeline_parallel_size": 2, "distributed_executor_backend": plugin.EXECUTOR},
    ),
    "expert_parallel_size": (2, {"enable_expert_parallel": True}),
    "gpu_memory_utilization": (0.31, {"gpu_memory_utilization": 0.31}),
    "kv_cache_gb": (0.5, {"kv_cache_memory_bytes": 2**29}),
    # what runs no CUDA graphs has none to leave
    "enforce_eager": (True, {"enforce_eager": True, "sleep_mode_offload_cudagraph": False}),
    "load_format": ("auto", {"load_format": "auto"}),
}


def options(
    changes: dict[str, Any] | None = None, tokenizer: str | None = None, *, on_cpu: bool = False
) -> dict[str, Any]:
    raw = changed(raw_grpo(), {"policy.generation.backend": "vllm", **(changes or {})})
    generation = complete_policy(raw["policy"])["generation"]
    return engine_options(generation, 5, tokenizer, on_cpu=on_cpu)


@pytest.mark.parametrize("key", VALUES)
def test_a_key_changes_its_argument_alone(key: str) -> None:
    value, expected = VALUES[key]
    assert options({f"policy.generation.vllm_cfg.{key}": value}) == {**options(), **expected}
    assert options() != {**options(), **expected}


def test_the_tokenizer_is_the_policy_s_unless_the_user_says_otherwise() -> None:
    assert options()["tokenizer_mode"] == "hf"
    own = {"policy.generation.vllm_kwargs": {"tokenizer_mode": "mistral"}}
    assert options(own)["tokenizer_mode"] == "mistral"


def test_a_node_of_an_engine_over_several_knows_the_others() -> None:
    """With vLLM's own executor, which alone starts over nodes, and that by name."""
    changes = {"policy.generation.vllm_cfg.tensor_parallel_size": 4}
    generation = complete_policy(
        changed(raw_grpo(), {"policy.generation.backend": "vllm", **changes})["policy"]
    )["generation"]
    given = engine_options(generation, 5, on_cpu=False, part=Part(1, 2, "10.0.0.3", 4711))
    of_nodes = {
        "nnodes": 2,
        "node_rank": 1,
        "master_addr": "10.0.0.3",
        "master_port": 4711,
        "distributed_executor_backend": "mp",
    }
    assert given == {**options(changes), **of_nodes}


PLACES = {
    "engines on nodes": ([4, 2], 2, [[(0, [0])], [(0, [2])], [(1, [0])]]),
    "one over both nodes": ([2, 2], 4, [[(0, [0]), (1, [0])]]),
    "two over two nodes each": ([3, 3, 3, 3], 6, [[(0, [0]), (1, [0])], [(2, [0]), (3, [0])]]),
    "a node too few": ([2, 2, 2], 4, None),
    "no whole nodes": ([2, 2], 3, None),
    "unequal nodes": ([1, 3], 4, None),
}


@pytest.mark.parametrize("case", PLACES)
def test_engines_lie_on_one_node_or_fill_neighbouring_ones(case: str) -> None:
    counts, ranks, expected = PLACES[case]
    groups = [SimpleNamespace(bundle_specs=[{"GPU": 1.0}] * count) for count in counts]
    cluster: Any = SimpleNamespace(get_placement_groups=lambda: groups)
    if expected is None:
        with pytest.raises(ConfigError, match=f"= {ranks}: it does not divide"):
            engine_places(cluster, ranks, "policy.generation.vllm_cfg")
        return
    assert engine_places(cluster, ranks, "policy.generation.vllm_cfg") == expected


@given(nodes=st.integers(1, 6), ranks=st.integers(1, 8), size=st.integers(1, 48))
def test_the_rule_and_the_places_agree(nodes: int, ranks: int, size: int) -> None:
    groups = [SimpleNamespace(bundle_specs=[{}] * ranks)] * nodes
    cluster: Any = SimpleNamespace(get_placement_groups=lambda: groups)
    try:
        found = engine_places(cluster, size, "policy.generation.vllm_cfg")
    except ConfigError:
        assert not fills_places(size, nodes, ranks)
        return
    assert fills_places(size, nodes, ranks) and len(found) * size == nodes * ranks


def test_what_is_not_said_is_the_policy_s() -> None:
    assert (options()["model"], options()["dtype"], options()["max_model_len"]) == (
        "owner/a-model-that-is-on-no-disk",
        "bfloat16",
        610,
    )
    own = options({"policy.generation.vllm_cfg": {"precision": "float16", "max_model_len": 700}})
    assert own == {**options(), "dtype": "float16", "max_model_len": 700}


def test_stop_strings_are_looked_for_in_the_texts_of_the_policy_s_tokenizer() -> None:
    assert options()["tokenizer"] == options()["model"]
    assert options(tokenizer="words") == {**options(), "tokenizer": "words"}


def test_devices_of_its_own_need_no_sleep_and_another_way_for_the_weights() -> None:
    apart = options({"policy.generation.colocated": {"enabled": False}})
    for key in ("enable_sleep_mode", "sleep_mode_offload_cudagraph"):
        assert options()[key] and not apart[key]
    assert options()["weight_transfer_config"] != apart["weight_transfer_config"]


def test_a_cpu_has_a_cache_of_a_known_size() -> None:
    assert not options(on_cpu=True)["enable_sleep_mode"]
    assert options(on_cpu=True)["kv_cache_memory_bytes"] == CACHE_ON_A_CPU
    assert (
        options({"policy.generation.vllm_cfg.kv_cache_gb": 0.5}, on_cpu=True)["kv_cache_memory_bytes"]
        == 2**29
    )


def test_the_answers_to_one_prompt_share_its_keys_and_values_unless_an_argument_says_otherwise() -> None:
    assert options()["enable_prefix_caching"] and options(on_cpu=True)["enable_prefix_caching"]
    assert options({"policy.generation.vllm_kwargs": {"enable_prefix_caching": False}}) == {
        **options(),
        "enable_prefix_caching": False,
    }


def test_further_arguments_come_last() -> None:
    further = {"moe_backend": "auto", "seed": 9}
    assert options({"policy.generation.vllm_kwargs": further}) == {**options(), **further}


@pytest.mark.parametrize(
    ("rows", "sizes"),
    [
        (1, [1]),
        (5, [1, 2, 4, 5]),
        (20, [1, 2, 4, 8, 16, 20]),
        (24, [1, 2, 4, 8, 16, 24]),
        (257, [1, 2, 4, *range(8, 256, 8), 256, 257]),
        (1024, [1, 2, 4, *range(8, 256, 8), *range(256, 513, 16)]),
    ],
)
def test_graphs_are_captured_up_to_the_rows_of_an_engine(rows: int, sizes: list[int]) -> None:
    given = {"policy.generation.vllm_kwargs": {"max_num_seqs": rows}}
    assert options(given) == {**options(), "max_num_seqs": rows, "cudagraph_capture_sizes": sizes}
    assert options(given, on_cpu=True) == {**options(on_cpu=True), "max_num_seqs": rows}
    assert "cudagraph_capture_sizes" not in options(
        {**given, "policy.generation.vllm_cfg.enforce_eager": True}
    )


@pytest.mark.parametrize(
    "own",
    [
        {"max_cudagraph_capture_size": 8},
        {"compilation_config": {"cudagraph_capture_sizes": [8]}},
        {"cudagraph_capture_sizes": [8]},
    ],
)
def test_sizes_of_graphs_that_arguments_choose_are_left_to_them(own: dict[str, Any]) -> None:
    further = {"max_num_seqs": 20, **own}
    assert options({"policy.generation.vllm_kwargs": further}) == {**options(), **further}


def test_a_gpu_has_experts_in_the_layout_that_a_refit_loads() -> None:
    assert options()["moe_backend"] == "triton" and "moe_backend" not in options(on_cpu=True)


LEAST = {
    "max_new_tokens": 7,
    "model_name": "owner/a-model-that-is-on-no-disk",
    "pad_token_id": 0,
    "stop_token_ids": [2],
    "vllm_cfg": {"max_model_len": 610, "precision": "bfloat16"},
}


def test_engines_made_without_a_run_s_configuration_are_those_of_its_defaults() -> None:
    raw = changed(raw_grpo(), {"policy.generation": {"backend": "vllm", **LEAST}})
    assert completed(LEAST) == complete_policy(raw["policy"])["generation"]


def test_arguments_stand_in_for_the_configuration_s_values() -> None:
    assert completed(LEAST, "other", 9, "float32") == {
        **completed(LEAST),
        "model_name": "other",
        "vllm_cfg": {**completed(LEAST)["vllm_cfg"], "max_model_len": 9, "precision": "float32"},
    }
    assert "backend" not in LEAST and LEAST["vllm_cfg"] == {"max_model_len": 610, "precision": "bfloat16"}


def test_values_that_nobody_else_knows_are_asked_for_at_once() -> None:
    with pytest.raises(
        ConfigError,
        match=r"lacks model_name, max_new_tokens, pad_token_id, stop_token_ids, vllm_cfg\.max_model_len",
    ):
        completed({})
    with pytest.raises(
        ConfigError,
        match=r"lacks stop_token_ids\. Fix: .* come from configure_generation_config\(config, tokenizer\)",
    ):
        completed({**LEAST, "stop_token_ids": None})
    assert completed({**LEAST, "stop_token_ids": []})["stop_token_ids"] == []
