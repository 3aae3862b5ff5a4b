"""Import and export of every family: bit for bit there and back, the same bytes whoever works, and every
mismatch by name."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from converters import importing
from converters.checkpoint.source import open_source
from converters.checkpoint.work import ConversionResult, RunOptions
from converters.errors import ConversionError
from converters.exporting import export_model, plan_export
from converters.importing import import_model, plan_import
from converters.opening import open_any, open_megatron
from converters.torch_dist.reader import TorchDistCheckpoint
from converters.verify import verify
from tests.tiers import newest_megatron, sampled
from tests.unit.converters_tiny import CONFIGS, save_tiny, stored_tensors

pytestmark = newest_megatron


@pytest.fixture(autouse=True)
def small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several item files and several chunks of a tensor, as with large models."""
    monkeypatch.setattr(importing, "_SMALLEST_FILE", 8_000)
    monkeypatch.setattr("converters.checkpoint.work.CHUNK_BYTES", 1_500)


def bring_in(
    source: Path, target: Path, plan_options: dict[str, Any] | None = None, **options: Any
) -> ConversionResult:
    return import_model(
        plan_import(open_source(source), **(plan_options or {})), target, RunOptions(**options)
    )


def bring_out(
    source: Path, target: Path, plan_options: dict[str, Any] | None = None, **options: Any
) -> ConversionResult:
    return export_model(
        plan_export(open_megatron(source), **(plan_options or {})), target, RunOptions(**options)
    )


def contents(directory: Path) -> dict[str, bytes]:
    return {
        path.relative_to(directory).as_posix(): path.read_bytes()
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }


def assert_same_tensors(one: Path, other: Path) -> None:
    left, right = stored_tensors(one), stored_tensors(other)
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        assert tensor.dtype == right[name].dtype and tensor.shape == right[name].shape, name
        assert torch.equal(tensor.view(torch.uint8), right[name].view(torch.uint8)), name


@sampled(6)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", CONFIGS)
def test_there_and_back_is_bit_exact(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    save_tiny(tmp_path / "hf", name, dtype)
    (tmp_path / "hf" / "tokenizer.json").write_text('{"a": 1}')
    (tmp_path / "hf" / "chat_template.jinja").write_text("{{ x }}")
    (tmp_path / "hf" / "modeling_own.py").write_text("raise SystemExit")
    bring_in(tmp_path / "hf", tmp_path / "mcore", {"vocab_multiple": 16})
    bring_out(tmp_path / "mcore", tmp_path / "back", {"max_shard_bytes": 60_000})
    assert_same_tensors(tmp_path / "hf", tmp_path / "back")
    for file in (
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "chat_template.jinja",
        "modeling_own.py",
    ):
        assert (tmp_path / "back" / file).read_bytes() == (tmp_path / "hf" / file).read_bytes()
    index = json.loads((tmp_path / "back" / "model.safetensors.index.json").read_text())
    tensors = stored_tensors(tmp_path / "back")
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors.values())
    assert verify(open_any(tmp_path / "hf"), open_any(tmp_path / "mcore")) == []
    assert verify(open_any(tmp_path / "mcore"), open_any(tmp_path / "back")) == []


@sampled(1)
@pytest.mark.parametrize("name", ["glm4_moe", "mixtral", "qwen2_moe", "qwen3_moe", "qwen3_moe_mixed"])
def test_stacked_experts_come_back_stacked(name: str, tmp_path: Path) -> None:
    save_tiny(tmp_path / "hf", name, stacked_experts=True)
    save_tiny(tmp_path / "alone", name)
    bring_in(tmp_path / "hf", tmp_path / "mcore")
    bring_in(tmp_path / "alone", tmp_path / "mcore2")
    bring_out(tmp_path / "mcore", tmp_path / "back")
    assert any(key.endswith("gate_up_proj") for key in stored_tensors(tmp_path / "back"))
    assert_same_tensors(tmp_path / "hf", tmp_path / "back")
    assert verify(open_any(tmp_path / "mcore"), open_any(tmp_path / "mcore2")) == []


def test_tensors_keep_their_own_dtypes(tmp_path: Path) -> None:
    """A float32 norm of one layer in a bfloat16 model, whose layers are stacked in one tensor of one
    dtype."""
    save_tiny(tmp_path / "hf", "qwen3", torch.bfloat16)
    file = tmp_path / "hf" / "model.safetensors"
    tensors = load_file(file)
    for name in ("model.layers.1.input_layernorm.weight", "model.layers.2.self_attn.k_proj.weight"):
        tensors[name] = tensors[name].float() * 1.001
    save_file(tensors, file, metadata={"format": "pt"})
    bring_in(tmp_path / "hf", tmp_path / "mcore")
    bring_out(tmp_path / "mcore", tmp_path / "back")
    assert_same_tensors(tmp_path / "hf", tmp_path / "back")


def test_a_stored_copy_of_a_tied_output_layer_comes_back(tmp_path: Path) -> None:
    save_tiny(tmp_path / "hf", "qwen2_tied")
    file = tmp_path / "hf" / "model.safetensors"
    tensors = load_file(file)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, file, metadata={"format": "pt"})
    bring_in(tmp_path / "hf", tmp_path / "mcore")
    assert "output_layer.weight" not in TorchDistCheckpoint(tmp_path / "mcore")
    bring_out(tmp_path / "mcore", tmp_path / "back")
    assert_same_tensors(tmp_path / "hf", tmp_path / "back")


@sampled(1)
@pytest.mark.parametrize("name", ["llama_all_biases", "qwen3_moe_mixed"])
def test_bytes_do_not_depend_on_workers_or_memory(name: str, tmp_path: Path) -> None:
    save_tiny(tmp_path / "hf", name)
    bring_in(tmp_path / "hf", tmp_path / "one", workers=1)
    bring_in(tmp_path / "hf", tmp_path / "many", workers=7, max_memory=2**40)
    assert contents(tmp_path / "one") == contents(tmp_path / "many")
    assert sum(path.endswith("_0.distcp") for path in contents(tmp_path / "one")) > 3
    bring_out(tmp_path / "one", tmp_path / "out1", {"max_shard_bytes": 50_000}, workers=1)
    bring_out(tmp_path / "many", tmp_path / "out2", {"max_shard_bytes": 50_000}, workers=5)
    one, two = contents(tmp_path / "out1"), contents(tmp_path / "out2")
    assert one.keys() == two.keys() and all(
        one[file] == two[file] for file in one if file != "conversion.json"
    )


def test_allowed_names_need_no_counterpart(tmp_path: Path) -> None:
    save_tiny(tmp_path / "hf", "llama")
    file = tmp_path / "hf" / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.1.mlp.down_proj.weight"]
    save_file({**tensors, "extra.weight": torch.zeros(2)}, file, metadata={"format": "pt"})
    allowed = {"allow_missing": ("model.layers.1.mlp.down*", "extra.*")}
    outcome = bring_in(tmp_path / "hf", tmp_path / "mcore", allowed)
    assert outcome.notes["left_out"] == ["extra.weight"]
    assert verify(open_any(tmp_path / "mcore")) == []
    with pytest.raises(ConversionError, match=r"decoder\.layers\.1\.mlp\.linear_fc2"):
        bring_out(tmp_path / "mcore", tmp_path / "back")
    bring_out(tmp_path / "mcore", tmp_path / "back", {"allow_missing": ("model.layers.1.mlp.down*",)})
    assert stored_tensors(tmp_path / "back").keys() == tensors.keys()
    half = {name: tensor for name, tensor in tensors.items() if name != "model.layers.0.mlp.up_proj.weight"}
    save_file(half, file, metadata={"format": "pt"})
    with pytest.raises(
        ConversionError, match=r"made of .*gate_proj.* missing: model\.layers\.0\.mlp\.up_proj\.weight"
    ):
        bring_in(tmp_path / "hf", tmp_path / "other", {"allow_missing": ("*",)})


def test_narrowing_only_when_asked_and_with_its_error(tmp_path: Path) -> None:
    save_tiny(tmp_path / "hf", "qwen2")
    outcome = bring_in(tmp_path / "hf", tmp_path / "mcore", {"dtype": torch.bfloat16})
    tensors = stored_tensors(tmp_path / "hf")
    worst = max(float((tensor - tensor.bfloat16().float()).abs().max()) for tensor in tensors.values())
    assert outcome.notes["largest_error"] == worst and outcome.notes["narrowed_tensors"] == len(tensors)
    bring_out(tmp_path / "mcore", tmp_path / "back")
    back = stored_tensors(tmp_path / "back")
    assert all(torch.equal(back[name], tensor.bfloat16()) for name, tensor in tensors.items())
    assert json.loads((tmp_path / "back" / "config.json").read_text())["dtype"] == "bfloat16"
    large = load_file(tmp_path / "hf" / "model.safetensors")
    large["model.norm.weight"][3] = 7e4
    save_file(large, tmp_path / "hf" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConversionError, match=r"model\.norm\.weight: 70000 is too large for float16"):
        bring_in(tmp_path / "hf", tmp_path / "half", {"dtype": torch.float16})


class Killed(BaseException):
    pass


def first_byte(safetensors: bytearray, name: str) -> int:
    """Where a tensor begins in a file."""
    length = int.from_bytes(safetensors[:8], "little")
    return 8 + length + int(json.loads(safetensors[8 : 8 + length])[name]["data_offsets"][0])


@sampled(2)
@pytest.mark.parametrize("direction", ["import", "export"])
@pytest.mark.parametrize("after", [0, 1, 5, 17, 40])
def test_an_interrupted_run_goes_on(
    direction: str, after: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped in the middle of a tensor; afterwards one finished piece is damaged, and is written again."""
    save_tiny(tmp_path / "hf", "mixtral")
    bring_in(tmp_path / "hf", tmp_path / "mcore")
    narrow = {"dtype": torch.bfloat16}
    run = {
        "import": lambda target: bring_in(tmp_path / "hf", target, narrow),
        "export": lambda target: bring_out(tmp_path / "mcore", target, narrow),
    }[direction]
    run(tmp_path / "expected")
    from converters.checkpoint.manifest import TensorHashes

    original, calls = TensorHashes.update, []

    def dying(self: TensorHashes, name: str, rows: torch.Tensor, start: int | None = None) -> None:
        calls.append(name)
        if len(calls) > after:
            raise Killed
        original(self, name, rows, start)

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(TensorHashes, "update", dying)
        run(tmp_path / "target")
    assert not (tmp_path / "target").exists()
    partial = tmp_path / ".target.partial"
    assert not (partial / "metadata.json").exists() and not (partial / "config.json").exists()
    records = [json.loads(line) for line in (partial / ".journal.jsonl").read_text().splitlines()][1:]
    if records:
        file = partial / records[0].get("file", "model.safetensors")
        data = bytearray(file.read_bytes())
        data[-40 if direction == "import" else first_byte(data, records[0]["tensor"])] ^= 1
        file.write_bytes(data)
    (partial / ".journal.jsonl").open("a").write('{"torn')
    (partial / "..journal.jsonl.0123abcd.tmp").write_text("torn too, as its beginning was written")
    outcome = run(tmp_path / "target")
    assert contents(tmp_path / "target") == contents(tmp_path / "expected")
    assert not partial.exists() and (outcome.resumed > 0) == (len(records) > 1)


def test_work_of_another_plan_is_not_taken_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_tiny(tmp_path / "hf", "llama")
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr("converters.importing.finish_checkpoint", lambda *_: (_ for _ in ()).throw(Killed()))
        bring_in(tmp_path / "hf", tmp_path / "target")
    outcome = bring_in(tmp_path / "hf", tmp_path / "target", {"dtype": torch.bfloat16})
    assert outcome.resumed == 0
    assert verify(open_any(tmp_path / "target")) == []


def test_places_that_are_refused(tmp_path: Path) -> None:
    save_tiny(tmp_path / "hf", "llama")
    for target in (tmp_path / "hf", tmp_path / "hf" / "inside", tmp_path):
        with pytest.raises(ConversionError, match="overlap"):
            bring_in(tmp_path / "hf", target, overwrite=True)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("x")
    with pytest.raises(ConversionError, match="exists"):
        bring_in(tmp_path / "hf", tmp_path / "mine")
    with pytest.raises(ConversionError, match="will not be overwritten"):
        bring_in(tmp_path / "hf", tmp_path / "mine", overwrite=True)
    bring_in(tmp_path / "hf", tmp_path / "mcore")
    shutil.copytree(tmp_path / "mcore", tmp_path / "before")
    bring_in(tmp_path / "hf", tmp_path / "mcore", overwrite=True)
    assert contents(tmp_path / "mcore") == contents(tmp_path / "before")
    (tmp_path / "mcore" / "huggingface" / "notes").mkdir()
    (tmp_path / "mcore" / "huggingface" / "notes" / "results.csv").write_text("x")
    with pytest.raises(ConversionError, match=r"(?s)will not be overwritten.*huggingface/notes/results\.csv"):
        bring_in(tmp_path / "hf", tmp_path / "mcore", overwrite=True)
    # The weights of a training run's checkpoint have no manifest of a conversion.
    (tmp_path / "before" / "conversion.json").unlink()
    before = contents(tmp_path / "before")
    with pytest.raises(ConversionError, match=r"(?s)not be overwritten.*no conversion.json, but \.meta"):
        bring_in(tmp_path / "hf", tmp_path / "before", overwrite=True)
    assert contents(tmp_path / "before") == before
    with pytest.raises(ConversionError, match=r"max-memory = 1 MiB: .* are needed"):
        bring_in(tmp_path / "hf", tmp_path / "other", max_memory=2**20)
    with pytest.raises(ConversionError, match="workers = 0"):
        bring_in(tmp_path / "hf", tmp_path / "other", workers=0)


def test_a_model_of_another_depth_and_vocabulary_needs_no_reference(tmp_path: Path) -> None:
    """Everything is in the checkpoint."""
    save_tiny(tmp_path / "hf", "qwen3", num_hidden_layers=5, vocab_size=131, intermediate_size=34)
    bring_in(tmp_path / "hf", tmp_path / "mcore")
    expected = stored_tensors(tmp_path / "hf")
    shutil.rmtree(tmp_path / "hf")
    bring_out(tmp_path / "mcore", tmp_path / "back")
    assert all(
        torch.equal(tensor, expected[name]) for name, tensor in stored_tensors(tmp_path / "back").items()
    )


def test_a_second_run_waits_neither_nor_takes_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Started while the first is at the very end of its work."""
    save_tiny(tmp_path / "hf", "llama")
    from converters.checkpoint import staging

    original, refused = staging.put_in_place, []

    def meanwhile(partial: Path, target: Path) -> None:
        with pytest.raises(ConversionError, match="another process is writing") as error:
            bring_in(tmp_path / "hf", tmp_path / "mcore")
        refused.append(str(error.value))
        original(partial, target)

    monkeypatch.setattr(staging, "put_in_place", meanwhile)
    bring_in(tmp_path / "hf", tmp_path / "mcore")
    assert refused and verify(open_any(tmp_path / "hf"), open_any(tmp_path / "mcore")) == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "mcore"]


def test_an_index_with_a_hole_as_large_as_an_overlap(tmp_path: Path) -> None:
    from converters.torch_dist.index import read_index, write_index

    save_tiny(tmp_path / "hf", "llama")
    bring_in(tmp_path / "hf", tmp_path / "mcore")
    index = read_index(tmp_path / "mcore")
    chunks = index.state_dict_metadata["embedding.word_embeddings.weight"].chunks
    first, second = chunks[0], chunks[1]
    place = index.storage_data
    moved = next(
        key for key in place if key.fqn == "embedding.word_embeddings.weight" and key.offset == second.offsets
    )
    shifted = torch.Size([second.offsets[0] - 1, second.offsets[1]])
    place[type(moved)(moved.fqn, shifted)] = place[moved]
    chunks[1] = type(second)(shifted, second.sizes)
    assert first.sizes[0] > 1
    with (tmp_path / "mcore" / ".metadata").open("wb") as file:
        write_index(index, file)
    with pytest.raises(ConversionError, match="overlap"):
        bring_out(tmp_path / "mcore", tmp_path / "back")


def test_export_refuses_a_checkpoint_that_is_not_what_its_manifest_says(tmp_path: Path) -> None:
    save_tiny(tmp_path / "hf", "llama")
    bring_in(tmp_path / "hf", tmp_path / "mcore")
    tensors = load_file(tmp_path / "hf" / "model.safetensors")
    needle = tensors["model.layers.1.self_attn.o_proj.weight"].numpy().tobytes()[:64]
    (file,) = (path for path in (tmp_path / "mcore").glob("*.distcp") if needle in path.read_bytes())
    data = bytearray(file.read_bytes())
    data[data.index(needle) + 8] ^= 1
    file.write_bytes(data)
    with pytest.raises(ConversionError, match=r"model\.layers\.1\.self_attn\.o_proj\.weight"):
        bring_out(tmp_path / "mcore", tmp_path / "back")
    assert not (tmp_path / "back").exists()


def test_a_manifest_knows_the_dtype(tmp_path: Path) -> None:
    """Widened, and one element then moved by less than the narrow dtype can tell."""
    save_tiny(tmp_path / "hf", "llama", torch.bfloat16)
    bring_in(tmp_path / "hf", tmp_path / "mcore")
    bring_out(tmp_path / "mcore", tmp_path / "back")
    tensors = {
        name: tensor.float() for name, tensor in load_file(tmp_path / "back" / "model.safetensors").items()
    }
    save_file(tensors, tmp_path / "back" / "model.safetensors", metadata={"format": "pt"})
    found = verify(open_any(tmp_path / "back"))
    assert {difference.name for difference in found} == tensors.keys() and {
        difference.kind for difference in found
    } == {"dtype"}


def test_a_file_holds_what_the_index_says_and_nothing_else(tmp_path: Path) -> None:
    save_tiny(tmp_path / "hf", "llama", max_shard_size="50KB")
    file = sorted((tmp_path / "hf").glob("*.safetensors"))[1]
    tensors = load_file(file)
    save_file({**tensors, "model.norm.weight.again": torch.zeros(3)}, file, metadata={"format": "pt"})
    with pytest.raises(ConversionError, match=r"model\.norm\.weight\.again"):
        bring_in(tmp_path / "hf", tmp_path / "mcore")
