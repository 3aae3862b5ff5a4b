"""Writing checkpoints: transformers loads them with equal logits, and they appear whole or not at all."""

from __future__ import annotations

import copy
import functools
import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from converters.checkpoint.source import HuggingFaceSource, open_source
from converters.checkpoint.writer import write_hf
from converters.errors import ConversionError
from converters.families.read import read_architecture
from converters.mapping.rules import all_rules
from converters.mapping.shards import load_shard, to_hf
from megarl.models.engine.adapters import write_peft
from megarl.models.engine.saving import write_model_files
from tests.tiers import newest_megatron, sampled
from tests.unit.converters_tiny import ALONE, save_tiny

pytestmark = newest_megatron


def converted(source: HuggingFaceSource, tp_size: int) -> Iterator[tuple[str, Tensor]]:
    """To Megatron shards and back."""
    architecture = read_architecture(source.read_json("config.json"))
    for rule in all_rules(architecture):
        yield from to_hf(
            rule,
            [load_shard(rule, source, architecture, rank, tp_size) for rank in range(tp_size)],
            architecture,
        )


def copied_files(model: Path, directory: Path, dtype: torch.dtype) -> None:
    write_model_files(model, directory, dtype, None, small_tokenizer(), scores=False)


def small_tokenizer() -> PreTrainedTokenizerFast:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit

    tokenizer = Tokenizer(WordLevel({"<unk>": 0, "one": 1, "two": 2}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="two")


def no_files(directory: Path, dtype: torch.dtype) -> None:
    (directory / "config.json").write_text("{}")


@sampled(5)
@pytest.mark.parametrize("max_shard_bytes", [5e9, 30_000, 1])
@pytest.mark.parametrize("name", ALONE)
def test_transformers_loads_it_with_equal_logits(name: str, max_shard_bytes: float, tmp_path: Path) -> None:
    model = save_tiny(tmp_path / "original", name)
    source = open_source(tmp_path / "original")
    out = write_hf(
        converted(source, 2),
        tmp_path / "deep" / "copy",
        functools.partial(copied_files, tmp_path / "original"),
        max_shard_bytes=max_shard_bytes,
    )
    assert out == tmp_path / "deep" / "copy"
    loaded, report = AutoModelForCausalLM.from_pretrained(
        out, output_loading_info=True, experts_implementation="eager"
    )
    assert not report["missing_keys"] and not report["unexpected_keys"]
    ids = torch.randint(0, 101, (2, 17), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        # loaded ones lie where the file has them; dot products of some processors round by where a vector
        # begins
        assert torch.equal(copy.deepcopy(loaded).eval()(ids).logits, model(ids).logits)
    assert PreTrainedTokenizerFast.from_pretrained(out).encode("two one") == [2, 1]
    written = open_source(out)
    assert written.names() == source.names()
    assert all(torch.equal(written.read(tensor), source.read(tensor)) for tensor in written.names())
    assert sorted(path.name for path in out.parent.iterdir()) == ["copy"]


def test_shards_keep_the_limit_and_the_index_counts_bytes(tmp_path: Path) -> None:
    tensors = {f"t{number}": torch.full((number + 1, 5), number, dtype=torch.bfloat16) for number in range(7)}
    out = write_hf(iter(tensors.items()), tmp_path / "out", no_files, max_shard_bytes=100)
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(10 * (number + 1) for number in range(7))
    files = sorted(path.name for path in out.glob("*.safetensors"))
    assert files == [
        f"model-{number:05d}-of-{len(files):05d}.safetensors" for number in range(1, len(files) + 1)
    ]
    assert len(files) == 4
    for file in files:
        with safe_open(out / file, "pt") as opened:
            assert opened.metadata() == {"format": "pt"}
            assert {name for name, place in index["weight_map"].items() if place == file} == set(
                opened.keys()
            )
            assert sum(opened.get_tensor(name).nbytes for name in opened.keys()) <= 100  # noqa: SIM118
    assert list(index["weight_map"]) == sorted(tensors)


def test_the_stream_may_reuse_its_buffer_and_yield_views(tmp_path: Path) -> None:
    def stream() -> Iterator[tuple[str, Tensor]]:
        buffer = torch.empty(3, 4)
        for number in range(3):
            yield f"t{number}", buffer.fill_(number)
        yield "transposed", torch.arange(12.0).reshape(3, 4).t()

    source = open_source(write_hf(stream(), tmp_path / "out", no_files))
    assert [source.read(f"t{number}").unique().tolist() for number in range(3)] == [[0.0], [1.0], [2.0]]
    assert torch.equal(source.read("transposed"), torch.arange(12.0).reshape(3, 4).t())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_config_is_written_with_the_dtype_of_most_bytes(dtype: torch.dtype, tmp_path: Path) -> None:
    given: list[torch.dtype] = []

    def noted(directory: Path, main: torch.dtype) -> None:
        given.append(main)
        no_files(directory, main)

    write_hf(
        [("a", torch.zeros(9, 9, dtype=dtype)), ("norm", torch.zeros(3, dtype=torch.float64))],
        tmp_path / "out",
        noted,
    )
    assert given == [dtype]


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o027, 0o640), (0o077, 0o600)])
def test_files_are_as_open_as_the_umask_allows(tmp_path: Path, umask: int, mode: int) -> None:
    """safetensors alone would keep its files from everybody else."""

    def with_adapter(directory: Path, dtype: torch.dtype) -> None:
        no_files(directory, dtype)
        write_peft(directory / "adapter", {"r": 1}, {"a": torch.ones(1)})
        (directory / "tokenizer.json").touch(0o600)

    before = os.umask(umask)
    try:
        write_hf(
            [("a", torch.ones(3)), ("b", torch.ones(3))],
            tmp_path / "m",
            with_adapter,
            max_shard_bytes=12,
        )
    finally:
        os.umask(before)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "m").rglob("*.*")}
    assert set(modes.values()) == {mode} and len(modes) == 7 and "model-00001-of-00002.safetensors" in modes


def test_an_existing_target_is_refused(tmp_path: Path) -> None:
    target = tmp_path / "out"
    write_hf([("a", torch.zeros(2))], target, no_files)
    with pytest.raises(ConversionError, match=r"exists\. Fix: choose another directory, or replace it"):
        write_hf([("b", torch.ones(2))], target, no_files)
    assert open_source(target).names() == ["a"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]
    (tmp_path / "empty").mkdir()
    write_hf([("a", torch.zeros(2))], tmp_path / "empty", no_files)


def test_a_failing_stream_leaves_nothing_behind(tmp_path: Path) -> None:
    def stream() -> Iterator[tuple[str, Tensor]]:
        yield "a", torch.zeros(2)
        yield "b", torch.zeros(2)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_hf(stream(), tmp_path / "out", no_files, max_shard_bytes=8)
    assert os.listdir(tmp_path) == []


def test_streams_and_limits_of_no_use_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConversionError, match="'a' comes twice"):
        write_hf(
            [("a", torch.zeros(2)), ("b", torch.zeros(2)), ("a", torch.zeros(2))],
            tmp_path / "out",
            no_files,
        )
    with pytest.raises(ConversionError, match="the stream of tensors is empty"):
        write_hf([], tmp_path / "out", no_files)
    with pytest.raises(ConversionError, match="max_shard_bytes = 0"):
        write_hf([("a", torch.zeros(2))], tmp_path / "out", no_files, max_shard_bytes=0)
    assert os.listdir(tmp_path) == []


def test_only_one_shard_is_held_in_memory(tmp_path: Path) -> None:
    """Earlier shards are on disk before the stream is asked for more."""
    seen: list[int] = []

    def stream() -> Iterator[tuple[str, Tensor]]:
        for number in range(6):
            seen.append(len(list(tmp_path.glob(".out.partial-*/*.safetensors"))))
            yield f"t{number}", torch.zeros(4)

    write_hf(stream(), tmp_path / "out", no_files, max_shard_bytes=32)
    assert seen == [0, 0, 0, 1, 1, 2]
