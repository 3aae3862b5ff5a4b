"""Keys of a published config.json, as a Megatron worker takes, ignores and refuses them."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from converters.errors import ConversionError
from megarl.algorithms.model_check import check_model
from megarl.parity.converted import logprobs_by
from tests.dist.pool import WorkerPool
from tests.unit.converters_tiny import save_tiny

TOKENS = torch.arange(1, 25).reshape(2, 12)


def changed(directory: Path, **changes: Any) -> Path:
    save_tiny(directory, "qwen3", rope_parameters={"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16})
    text = json.loads((directory / "config.json").read_text())
    text["rope_parameters"] |= changes.pop("rope_parameters", {})
    (directory / "config.json").write_text(json.dumps(text | changes))
    return directory


def policy(directory: Path, **megatron: Any) -> dict[str, Any]:
    return {"model_name": str(directory), "trust_remote_code": False, "megatron_cfg": {"enabled": True, **megatron}}


def test_ignored_config_keys(pool: WorkerPool, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Refused by the driver and by the worker without the key, the model without them with it."""
    directory = changed(tmp_path / "hf", logit_scale=0.5, neftune_noise_alpha=5.0)
    plain = changed(tmp_path / "plain")
    for refusing in (lambda: check_model(policy(directory)), lambda: logprobs_by(pool, [])(directory, TOKENS)):
        with pytest.raises(ConversionError, match=r"logit_scale = 0\.5: vLLM multiplies"):
            refusing()
    ignored = ["logit_scale"]
    with caplog.at_level(logging.WARNING):
        assert check_model(policy(directory, ignore_config_keys=ignored)) == 101
    assert "neftune_noise_alpha = 5.0: passed over" in caplog.text and "logit_scale = 0.5: ignored as asked for" in caplog.text
    found = logprobs_by(pool, [], ignore_config_keys=ignored)(directory, TOKENS)
    assert torch.equal(found, logprobs_by(pool, [])(plain, TOKENS))


def test_a_rotary_factor_of_vllm_is_refused_by_the_worker_too(pool: WorkerPool, tmp_path: Path) -> None:
    directory = changed(tmp_path / "hf", rope_parameters={"attn_factor": 0.8782488562869419})
    for refusing in (lambda: check_model(policy(directory)), lambda: logprobs_by(pool, [])(directory, TOKENS)):
        with pytest.raises(ConversionError, match=r"attn_factor = 0\.878\d*: transformers does not read it, vLLM multiplies"):
            refusing()


def test_dropout_is_said_and_not_used(pool: WorkerPool, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    directory = changed(tmp_path / "hf", attention_dropout=0.1)
    with caplog.at_level(logging.WARNING):
        check_model(policy(directory))
    assert "attention_dropout = 0.1: training uses 0" in caplog.text
    assert torch.equal(logprobs_by(pool, [])(directory, TOKENS), logprobs_by(pool, [])(changed(tmp_path / "plain"), TOKENS))
