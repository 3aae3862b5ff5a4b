"""Keys of a published config.json, as a Megatron worker takes, ignores and refuses them."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from converters.errors import ConversionError
from megarl.parity.converted import logprobs_by
from megarl.parity.pool import WorkerPool
from megarl.run.model_check import check_model
from tests.tiers import sampled
from tests.unit.converters_tiny import save_tiny
from tests.unit.published_models import CLASS_OF, published, save_published

OF_FAMILIES = ("Kimi-K2", "Llama-3.2-1B", "Seed-OSS-36B-Instruct", "GLM-4.7-Flash", "gpt-oss-20b-BF16")
TOKENS = torch.arange(1, 25).reshape(2, 12)


def changed(directory: Path, **changes: Any) -> Path:
    save_tiny(
        directory,
        "qwen3",
        rope_parameters={"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    )
    text = json.loads((directory / "config.json").read_text())
    text["rope_parameters"] |= changes.pop("rope_parameters", {})
    (directory / "config.json").write_text(json.dumps(text | changes))
    return directory


def policy(directory: Path, **megatron: Any) -> dict[str, Any]:
    return {
        "model_name": str(directory),
        "trust_remote_code": False,
        "merged_adapter": None,
        "megatron_cfg": {"enabled": True, **megatron},
    }


def test_ignored_config_keys(pool: WorkerPool, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Refused by the driver and by the worker without the key, the model without them with it."""
    directory = changed(tmp_path / "hf", logit_scale=0.5, neftune_noise_alpha=5.0)
    plain = changed(tmp_path / "plain")
    for refusing in (
        lambda: check_model(policy(directory)),
        lambda: logprobs_by(pool, [])(directory, TOKENS),
    ):
        with pytest.raises(ConversionError, match=r"logit_scale = 0\.5: vLLM multiplies"):
            refusing()
    ignored = ["logit_scale"]
    with caplog.at_level(logging.WARNING):
        assert check_model(policy(directory, ignore_config_keys=ignored)) == 101
    assert (
        "neftune_noise_alpha = 5.0: ignored" in caplog.text
        and "logit_scale = 0.5: ignored as requested" in caplog.text
    )
    found = logprobs_by(pool, [], ignore_config_keys=ignored)(directory, TOKENS)
    assert torch.equal(found, logprobs_by(pool, [])(plain, TOKENS))


def test_a_rotary_factor_of_vllm_is_refused_by_the_worker_too(pool: WorkerPool, tmp_path: Path) -> None:
    directory = changed(tmp_path / "hf", rope_parameters={"attn_factor": 0.8782488562869419})
    for refusing in (
        lambda: check_model(policy(directory)),
        lambda: logprobs_by(pool, [])(directory, TOKENS),
    ):
        with pytest.raises(
            ConversionError, match=r"attn_factor = 0\.878\d*: transformers does not read it, vLLM multiplies"
        ):
            refusing()


def test_dropout_is_said_and_not_used(
    pool: WorkerPool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory = changed(tmp_path / "hf", attention_dropout=0.1)
    with caplog.at_level(logging.WARNING):
        check_model(policy(directory))
    assert "attention_dropout = 0.1: training uses 0" in caplog.text
    assert torch.equal(
        logprobs_by(pool, [])(directory, TOKENS), logprobs_by(pool, [])(changed(tmp_path / "plain"), TOKENS)
    )


@sampled(2, name=["Kimi-K2"])
@pytest.mark.parametrize("name", OF_FAMILIES)
def test_a_published_config_gives_the_logprobs_of_transformers(
    name: str, pool: WorkerPool, tmp_path: Path
) -> None:
    """Kimi-K2 without the code beside it, which is not there."""
    text = {
        "quantization_config": None,
        "num_nextn_predict_layers": 0,
        "torch_dtype": "float32",
        "dtype": "float32",
    }
    save_published(
        tmp_path / "hf", name, **{key: value for key, value in text.items() if key in published(name)}
    )
    content = json.loads((tmp_path / "hf" / "config.json").read_text())
    found = logprobs_by(pool, [])(tmp_path / "hf", TOKENS)
    content |= {"model_type": CLASS_OF.get(content["model_type"], content["model_type"]), "dtype": "float32"}
    config = AutoConfig.for_model(
        **{key: value for key, value in content.items() if "token_id" not in key and key != "auto_map"}
    )
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path / "hf", config=config, dtype=torch.float32, experts_implementation="eager"
    )
    with torch.no_grad():
        logprobs = model(TOKENS).logits[:, :-1].log_softmax(-1).gather(2, TOKENS[:, 1:, None]).squeeze(2)
    torch.testing.assert_close(found[:, 1:], logprobs, rtol=0, atol=2e-5)
