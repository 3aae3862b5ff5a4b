"""Functions that code written for NeMo-RL imports from the policy's utilities."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from transformers import LlamaConfig, Qwen2Config, Qwen2MoeConfig

from megarl.distributed.allocator import fast_pinning
from megarl.distributed.device import DeviceRuntime
from megarl.errors import ConfigError
from megarl.models.policy import PolicyConfig, utils
from megarl.models.policy.lm_policy import worker_environment
from megarl.models.policy.utils import (
    configure_expandable_segments,
    get_megatron_checkpoint_dir,
    get_runtime_env_for_policy_worker,
    import_class_from_path,
    is_vllm_v1_engine_enabled,
    sliding_window_overwrite,
)
from tests.unit.published_models import TEXTS


def test_every_function_of_the_reference_is_there() -> None:
    assert set(utils.__all__) == {
        "is_vllm_v1_engine_enabled",
        "import_class_from_path",
        "get_gpu_info",
        "sliding_window_overwrite",
        "configure_expandable_segments",
        "get_runtime_env_for_policy_worker",
        "get_megatron_checkpoint_dir",
    }
    assert is_vllm_v1_engine_enabled()


def test_a_class_by_its_path() -> None:
    assert import_class_from_path("collections.OrderedDict").__name__ == "OrderedDict"
    for name in ("collections.Nothing", "no_such_module.Name", "Name", ""):
        with pytest.raises(ConfigError, match="nothing can be imported"):
            import_class_from_path(name)


def test_where_checkpoints_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    for name in ("MEGARL_MEGATRON_CHECKPOINT_DIR", "HF_HOME"):
        monkeypatch.delenv(name, raising=False)
    assert get_megatron_checkpoint_dir() == "/home/someone/.cache/huggingface/megarl"
    monkeypatch.setenv("HF_HOME", "/data/hf")
    monkeypatch.setenv("MEGARL_MEGATRON_CHECKPOINT_DIR", "  ")
    assert get_megatron_checkpoint_dir() == "/data/hf/megarl"
    monkeypatch.setenv("MEGARL_MEGATRON_CHECKPOINT_DIR", "/data/mcore")
    assert get_megatron_checkpoint_dir() == "/data/mcore"


def test_a_profiler_where_its_pattern_matches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MEGARL_NSYS_WORKER_PATTERNS", raising=False)
    assert get_runtime_env_for_policy_worker("megatron_policy_worker") == {}
    monkeypatch.setenv("MEGARL_NSYS_WORKER_PATTERNS", "*policy*")
    assert "nsight" in get_runtime_env_for_policy_worker("megatron_policy_worker")


@pytest.mark.parametrize(
    ("set_before", "capability", "after"),
    [
        (None, 9, "expandable_segments:True"),
        ("max_split_size_mb:64", 10, "max_split_size_mb:64,expandable_segments:True"),
        ("expandable_segments:False", 9, "expandable_segments:False"),
        ("max_split_size_mb:64", 8, "max_split_size_mb:64"),
        ("expandable_segments:True", 8, RuntimeError),
    ],
)
@pytest.mark.parametrize("variable", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_expandable_segments(
    monkeypatch: pytest.MonkeyPatch,
    variable: str,
    set_before: str | None,
    capability: int,
    after: str | type[Exception],
) -> None:
    other = "PYTORCH_ALLOC_CONF" if variable == "PYTORCH_CUDA_ALLOC_CONF" else "PYTORCH_CUDA_ALLOC_CONF"
    # without a value, the newer variable is as good as not set
    variable = variable if set_before else "PYTORCH_CUDA_ALLOC_CONF"
    monkeypatch.setenv(other, "")
    monkeypatch.setenv(variable, set_before or "")
    configure_expandable_segments()
    assert os.environ[variable] == (set_before or ""), "on a CPU nothing is done"
    monkeypatch.setattr(utils, "runtime", lambda: DeviceRuntime(torch.device("cuda", 0), "nccl"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (capability, 0))
    if isinstance(after, str):
        configure_expandable_segments()
        assert os.environ[variable] == after
    else:
        with pytest.raises(after, match="Hopper"):
            configure_expandable_segments()


def test_a_window_that_is_switched_off(tmp_path: Path) -> None:
    for name, config, wanted in (
        ("on", Qwen2Config(use_sliding_window=True, sliding_window=8), {}),
        ("none", LlamaConfig(), {}),
        ("off, by its class", Qwen2Config(use_sliding_window=False, sliding_window=8), {}),
        ("off", Qwen2MoeConfig(use_sliding_window=False, sliding_window=8), {"sliding_window": None}),
    ):
        config.save_pretrained(tmp_path / name)
        assert sliding_window_overwrite(str(tmp_path / name)) == wanted, name


def test_a_config_of_a_family_that_transformers_knows_by_another_name(tmp_path: Path) -> None:
    """Read without the code beside the model, which is not there."""
    (tmp_path / "config.json").write_text((TEXTS / "Kimi-K2.json").read_text())
    assert sliding_window_overwrite(str(tmp_path)) == {}


@pytest.mark.parametrize(
    ("layout", "gpus", "already", "own", "expected"),
    [
        ({"tensor_model_parallel_size": 2}, True, None, None, "1"),
        ({"context_parallel_size": 2}, True, None, None, "1"),
        ({"tensor_model_parallel_size": 2}, False, None, None, None),
        ({}, True, None, None, None),
        ({"tensor_model_parallel_size": 2}, True, "8", None, None),
        ({"tensor_model_parallel_size": 2}, True, None, {"CUDA_DEVICE_MAX_CONNECTIONS": 32}, "32"),
    ],
)
def test_one_queue_of_a_gpu_for_collectives_beside_products(
    monkeypatch: pytest.MonkeyPatch,
    layout: dict[str, int],
    gpus: bool,
    already: str | None,
    own: Any,
    expected: str | None,
) -> None:
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    if already is not None:
        monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", already)
    megatron = {
        "enabled": True,
        "tensor_model_parallel_size": 1,
        "context_parallel_size": 1,
        **layout,
        "env_vars": own,
    }
    assert environment(megatron, gpus).get("CUDA_DEVICE_MAX_CONNECTIONS") == expected


def environment(megatron: dict[str, Any], gpus: bool, precision: str = "bfloat16") -> dict[str, str]:
    config = {"megatron_cfg": megatron, "dtensor_cfg": {"enabled": False}, "precision": precision}
    return worker_environment(cast(PolicyConfig, config), gpus)


@pytest.mark.parametrize(
    ("precision", "gpus", "already", "expected"),
    [
        ("float32", True, None, "0"),
        ("bfloat16", True, None, None),
        ("float32", False, None, None),
        ("float32", True, "1", None),
    ],
)
def test_float32_is_float32_in_every_library(
    monkeypatch: pytest.MonkeyPatch, precision: str, gpus: bool, already: str | None, expected: str | None
) -> None:
    monkeypatch.delenv("NVIDIA_TF32_OVERRIDE", raising=False)
    if already is not None:
        monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", already)
    megatron = {"enabled": True, "tensor_model_parallel_size": 1, "context_parallel_size": 1}
    assert environment(megatron, gpus, precision).get("NVIDIA_TF32_OVERRIDE") == expected


PINNED = "pinned_use_cuda_host_register:True,pinned_num_register_threads:8"


@pytest.mark.parametrize(
    ("given", "name", "expected"),
    [
        ({}, "PYTORCH_CUDA_ALLOC_CONF", PINNED),
        (
            {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"},
            "PYTORCH_CUDA_ALLOC_CONF",
            f"expandable_segments:True,{PINNED}",
        ),
        (
            {"PYTORCH_ALLOC_CONF": "pinned_num_register_threads:2", "PYTORCH_CUDA_ALLOC_CONF": "a:1"},
            "PYTORCH_ALLOC_CONF",
            "pinned_num_register_threads:2,pinned_use_cuda_host_register:True",
        ),
    ],
)
def test_page_locked_memory_is_taken_by_several_threads(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, str], name: str, expected: str
) -> None:
    for variable in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(variable, raising=False)
    for variable, value in given.items():
        monkeypatch.setenv(variable, value)
    assert fast_pinning() == {name: expected}


def test_other_backends_get_what_their_section_says() -> None:
    dtensor = {"enabled": True, "tensor_parallel_size": 2, "context_parallel_size": 1, "env_vars": {"A": 1}}
    config = cast(
        PolicyConfig, {"dtensor_cfg": dtensor, "megatron_cfg": {"enabled": False}, "precision": "float32"}
    )
    assert worker_environment(config, gpus=False) == {"A": "1"}
    assert worker_environment(config, gpus=True) == {"A": "1", **fast_pinning()}
