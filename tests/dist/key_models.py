"""The tiny models and tokenizers that configuration keys are shown on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.models import VOCABULARY, make_tiny

SPECIAL = ["<pad>", "<s>", "</s>"]
CODE = """
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM


class RemoteConfig(Qwen2Config):
    pass


class RemoteTokenizer(PreTrainedTokenizerFast):
    pass


class RemoteModel(Qwen2ForCausalLM):
    config_class = RemoteConfig
"""


def make_models(root: Path) -> dict[str, Path]:
    """By name, of one layer each: ``qwen2``, ``other`` (other weights), ``deep`` (four layers), ``mixtral``,
    ``remote`` (``qwen2`` with code of its own beside it); and tokenizers: ``tokenizer``, ``backwards`` (other
    numbers) and ``coded`` (with code of its own)."""
    made = {
        "qwen2": make_tiny(root / "qwen2", "qwen2", tied=False, layers=1),
        "other": make_tiny(root / "other", "qwen2", tied=False, layers=1, seed=1),
        "deep": make_tiny(root / "deep", "qwen2", tied=False, layers=4),
        "mixtral": make_tiny(root / "mixtral", "mixtral", tied=False, layers=1),
        "remote": make_tiny(root / "remote", "qwen2", tied=False, layers=1),
    }
    words = [f"w{number}" for number in range(len(SPECIAL), VOCABULARY)]
    made |= {name: tokenizer_of_words(root / name, words) for name in ("tokenizer", "coded")}
    made["backwards"] = tokenizer_of_words(root / "backwards", words[::-1])
    _bring_code(
        made["remote"], "config.json", {"AutoConfig": "RemoteConfig", "AutoModelForCausalLM": "RemoteModel"}
    )
    _bring_code(made["coded"], "tokenizer_config.json", {"AutoTokenizer": [None, "RemoteTokenizer"]})
    return made


def _bring_code(folder: Path, file_name: str, classes: dict[str, Any]) -> None:
    """Code beside a model or tokenizer, and where its file says so, the classes that are to be made from
    it."""

    def placed(name: Any) -> Any:
        return [placed(part) for part in name] if isinstance(name, list) else name and f"remote_code.{name}"

    (folder / "remote_code.py").write_text(CODE, encoding="utf-8")
    content = json.loads((folder / file_name).read_text(encoding="utf-8"))
    content["auto_map"] = {auto: placed(name) for auto, name in classes.items()}
    (folder / file_name).write_text(json.dumps(content), encoding="utf-8")


def tokenizer_of_words(path: Path, words: list[str]) -> Path:
    """Whole words, one token each; every text that is decoded holds a ``w``."""
    backend = Tokenizer(
        models.WordLevel({word: place for place, word in enumerate([*SPECIAL, *words])}, unk_token="<pad>")
    )
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    ).save_pretrained(path)
    return path
