"""PEFT adapters merged by import and export: against peft itself, against a slow formula bit for bit, and
what is refused."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from converters.adapters import lora
from converters.checkpoint import work
from converters.command import main
from converters.opening import open_any
from tests.prediction_layers import add_prediction_layers
from tests.seeing import make_seeing, save_text_part
from tests.tiers import sampled
from tests.unit.converters_tiny import save_tiny, stored_tensors

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "all": ("llama_all_biases", {"target_modules": [*ATTENTION, "gate_proj", "up_proj", "down_proj"]}),
    "patterns": (
        "qwen2_tied",
        {
            "target_modules": ["q_proj", "down_proj"],
            "rank_pattern": {"q_proj": 3, "layers.1.mlp.down_proj": 5},
            "alpha_pattern": {"^model.layers.2.self_attn.q_proj": 1.5},
        },
    ),
    "stabilized": ("mistral", {"target_modules": ".*layers.[02].*(v|o)_proj", "use_rslora": True}),
    "embeddings": ("llama", {"target_modules": ["embed_tokens", "lm_head"]}),
    "experts": ("qwen3_moe_mixed", {"target_modules": ["gate_proj", "up_proj", "down_proj", "o_proj"]}),
    "experts called otherwise": (
        "mixtral",
        {"target_modules": ["q_proj"], "target_parameters": ["experts.down_proj"], "use_rslora": True},
    ),
    "experts in turns": (
        "gpt_oss",
        {"target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]},
    ),
    "router": ("qwen3_moe", {"target_modules": ["k_proj", "mlp.gate"]}),
    "all layers but the experts": ("qwen2_moe", {"target_modules": "all-linear"}),
    "all layers of a mixture": (
        "deepseek_v3",
        {"target_modules": "all-linear", "alpha_pattern": {"mlp.gate.weight": 9}},
    ),
    "saved modules": (
        "llama",
        {"target_modules": ["q_proj"], "modules_to_save": ["lm_head", "embed_tokens", "norm"]},
    ),
    "a saved router": ("qwen3_moe", {"target_modules": ["q_proj"], "modules_to_save": ["mlp.gate"]}),
    "tokens": (
        "llama",
        {"target_modules": ["q_proj"], "trainable_token_indices": {"embed_tokens": [97, 3], "lm_head": [5]}},
    ),
    "a saved tied embedding": (
        "llama_tied",
        {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
    ),
    "tokens of a tied embedding": (
        "llama_tied",
        {"target_modules": ["q_proj"], "trainable_token_indices": [3, 7]},
    ),
}


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several chunks a tensor, of other rows on each side."""
    monkeypatch.setattr(work, "CHUNK_BYTES", 1500)


def adapter(base: Path, directory: Path, kind: Any = AutoModelForCausalLM, **options: Any) -> Path:
    """An adapter of random weights for the model in ``base``, saved by peft."""
    torch.manual_seed(3)
    model = kind.from_pretrained(base, dtype=torch.float32, experts_implementation="eager")
    changed = get_peft_model(model, LoraConfig(r=4, lora_alpha=6, **options))
    with torch.no_grad():
        for name, parameter in changed.named_parameters():
            if any(word in name for word in ("lora_", "modules_to_save", "trainable_tokens_delta")):
                parameter.copy_(torch.randn(parameter.shape) * 0.1)
    changed.save_pretrained(directory)
    return directory


def merged_by_peft(base: Path, adapter_directory: Path, target: Path) -> dict[str, Tensor]:
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, experts_implementation="eager")
    PeftModel.from_pretrained(model, adapter_directory).merge_and_unload().save_pretrained(target)
    return stored_tensors(target)


def run(*argv: str | Path) -> None:
    assert main([*map(str, argv)]) == 0, argv


@sampled(1, case=["saved modules", "tokens", "all layers but the experts", "all layers of a mixture"])
@pytest.mark.parametrize("case", CASES)
def test_as_peft_merges(case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    family, options = CASES[case]
    hf, mcore, plain, one, other = (tmp_path / name for name in ("hf", "mcore", "plain", "one", "other"))
    save_tiny(hf, family)
    directory = adapter(hf, tmp_path / "adapter", **options)
    run("import", hf, mcore, "--lora", directory)
    run("export", mcore, one)
    run("import", hf, plain)
    run("export", plain, other, "--lora", directory)
    base, expected, found = (
        stored_tensors(hf),
        merged_by_peft(hf, directory, tmp_path / "peft"),
        stored_tensors(one),
    )
    assert set(found) == set(expected) and sum(not torch.equal(found[name], base[name]) for name in base) > 0
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-6, atol=1e-6)
        changed = not torch.equal(tensor, base[name])
        assert changed == (not torch.equal(found[name], base[name])), name
    for name, tensor in stored_tensors(other).items():
        assert torch.equal(tensor, found[name]), name
    run("verify", hf, mcore, "--lora", directory)
    run("verify", plain, one, "--lora", directory)
    assert main(["verify", str(hf), str(mcore)]) == 1 and "values: " in capsys.readouterr().out
    assert open_any(mcore).manifest.notes["lora"] == "adapter"  # type: ignore[union-attr]


def slowly(base: Tensor, factors: dict[str, Tensor], module: str, scaling: float) -> Tensor:
    """The merged matrix in float32, one element after another, the sum in the order of the ranks."""
    down, up = (factors[f"base_model.model.{module}.lora_{letter}.weight"].float() for letter in "AB")
    merged = torch.empty_like(base)
    for row in range(base.shape[0]):
        total = torch.zeros(base.shape[1])
        for rank in range(down.shape[0]):
            total = total + up[row, rank] * down[rank]
        merged[row] = (base[row].float() + total * scaling).to(base.dtype)
    return merged


@sampled(1)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_bit_for_bit_in_a_narrow_dtype(
    dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hf, directory = tmp_path / "hf", tmp_path / "adapter"
    save_tiny(hf, "mixtral", dtype)
    base, modules = (
        stored_tensors(hf),
        ["model.layers.1.self_attn.o_proj", "model.layers.2.block_sparse_moe.experts.3.w2"],
    )
    factors = {}
    for module in modules:  # as saved with transformers 4, where experts are modules
        rows, columns = base[f"{module}.weight"].shape
        factors[f"base_model.model.{module}.lora_A.weight"] = torch.randn(5, columns).to(dtype)
        factors[f"base_model.model.{module}.lora_B.weight"] = torch.randn(rows, 5) * 0.1
    directory.mkdir()
    save_file(factors, directory / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "r": 5,
        "lora_alpha": 7,
        "use_rslora": True,
        "target_modules": ["w2", "o_proj"],
        "layers_to_transform": [1, 2],
    }
    (directory / "adapter_config.json").write_text(json.dumps(config))
    monkeypatch.setattr(lora, "_BLOCK_ELEMENTS", 130)
    run("import", hf, tmp_path / "mcore", "--lora", directory, "--workers", "3")
    run("export", tmp_path / "mcore", tmp_path / "back")
    found = stored_tensors(tmp_path / "back")
    for name, tensor in base.items():
        module = name.removesuffix(".weight")
        expected = slowly(tensor, factors, module, 7 / math.sqrt(5)) if module in modules else tensor
        assert found[name].dtype == dtype and torch.equal(found[name], expected), name
    # in float32 the sums are not rounded to what the base is stored in
    run("import", hf, tmp_path / "wide", "--lora", directory, "--dtype", "float32")
    run("verify", hf, tmp_path / "mcore", "--lora", directory)
    run("export", tmp_path / "wide", tmp_path / "wide-back")
    wide = stored_tensors(tmp_path / "wide-back")[f"{modules[0]}.weight"]
    assert torch.equal(
        wide, slowly(base[f"{modules[0]}.weight"].float(), factors, modules[0], 7 / math.sqrt(5))
    )


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "DoRA": ({"use_dora": True}, "use_dora = true"),
    "another method": ({"peft_type": "IA3"}, "peft_type = 'IA3'"),
    "biases": ({"bias": "lora_only"}, "bias = 'lora_only'"),
    "saved modules that are not there": (
        {"modules_to_save": ["lm_head"]},
        "missing: lm_head.weight, which modules_to_save lists",
    ),
    "tokens of no kind": (
        {"trainable_token_indices": {"embed_tokens": ["a"]}},
        "a list of token ids is needed",
    ),
    "a changed base": ({"init_lora_weights": "pissa"}, "init_lora_weights = 'pissa'"),
    "replicated layers": ({"layer_replication": [[0, 2]]}, "layer_replication"),
    "transposed": ({"fan_in_fan_out": True}, "fan_in_fan_out = True"),
    "an unknown key": ({"a_new_method": {"strength": 2}}, "a_new_method"),
    "no rank": ({"r": 0}, "r = 0: a positive number"),
    "a scale beyond floats": ({"lora_alpha": 10**400}, "0: a positive number is needed"),
    "a rank and a half": ({"r": 1.5}, "r = 1.5: a rank has to be a whole number"),
    "a rank and a half of a pattern": ({"rank_pattern": {"o_proj": 8.5}}, "o_proj = 8.5: a rank has to be"),
    "a broken pattern": ({"rank_pattern": {"(": 3}}, "is no regular expression"),
    "a flag inside a pattern": (
        {"alpha_pattern": {"(?i)Q_PROJ": 3}},
        "is no regular expression (global flags",
    ),
    "a broken expression": ({"target_modules": "("}, "target_modules: '(' is no regular expression"),
    "factors that no target names": (
        {"target_modules": ["k_proj"]},
        "layers.0.self_attn.q_proj: has factors, but target_modules does not choose it",
    ),
    "factors that an expression leaves out": (
        {"target_modules": r".*\.[01]\.self_attn\.q_proj"},
        "  - model.layers.2.self_attn.q_proj: has factors, but target_modules does not choose it",
    ),
    "saved modules that are no list": ({"modules_to_save": True}, "modules_to_save = True: a list"),
    "a saved module that is no list": ({"modules_to_save": "lm_head"}, "modules_to_save = 'lm_head': a list"),
    "tokens that are not there": (
        {"trainable_token_indices": [3, 1]},
        "missing: the rows that trainable_token_indices lists",
    ),
    "another rank": (
        {"r": 3},
        "shape: base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight is [4, 42], rank 3",
    ),
    "a module without an adapter": (
        {"target_modules": ["q_proj", "up_proj"]},
        "missing: model.layers.2.mlp.up_proj, which target_modules",
    ),
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("lora")
    save_tiny(root / "hf", "qwen2")
    adapter(root / "hf", root / "adapter", target_modules=["q_proj"])
    return root


def refused(root: Path, directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> str:
    capsys.readouterr()
    assert main(["import", str(root / "hf"), str(tmp_path / "mcore"), "--lora", str(directory)]) == 2
    assert not (tmp_path / "mcore").exists()
    error = capsys.readouterr().err
    assert "Traceback" not in error and "Fix:" in error
    return error


def altered(
    root: Path,
    tmp_path: Path,
    config: dict[str, Any],
    change: Callable[[dict[str, Tensor]], Any] = lambda tensors: None,
) -> Path:
    directory = tmp_path / "altered"
    directory.mkdir()
    stored = json.loads((root / "adapter" / "adapter_config.json").read_text())
    (directory / "adapter_config.json").write_text(json.dumps({**stored, **config}))
    tensors = load_file(root / "adapter" / "adapter_model.safetensors")
    change(tensors)
    save_file(tensors, directory / "adapter_model.safetensors")
    return directory


@pytest.mark.parametrize("name", ["glm4_moe", "deepseek_v3"])
def test_a_base_with_a_prediction_layer(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As published: transformers has no such layer, so that an adapter trained with it has no factors for
    it."""
    hf, mcore, back = tmp_path / "hf", tmp_path / "mcore", tmp_path / "back"
    save_tiny(hf, name)
    targets = ["o_proj", "gate_proj", "up_proj", "down_proj"]
    directory = adapter(
        hf, tmp_path / "adapter", target_modules=targets, target_parameters=["mlp.experts.down_proj"]
    )
    expected = merged_by_peft(hf, directory, tmp_path / "peft")
    added = add_prediction_layers(hf)
    run("import", hf, mcore, "--lora", directory)
    run("export", mcore, back)
    found = stored_tensors(back)
    assert set(found) == {*expected, *added}
    for tensor_name, tensor in expected.items():
        torch.testing.assert_close(found[tensor_name], tensor, rtol=1e-6, atol=1e-6)
    assert all(torch.equal(found[tensor_name], tensor) for tensor_name, tensor in added.items())
    # what is missing elsewhere, or of a prediction layer that has some of its factors, is still missed
    tensors = load_file(directory / "adapter_model.safetensors")
    layer = "base_model.model.model.layers.{}.self_attn.o_proj.lora_{}.weight"
    whole = {
        **tensors,
        **{layer.format(3, letter): tensors[layer.format(2, letter)].clone() for letter in "AB"},
    }
    for changed, missing in (
        (without(tensors, layer.format(0, "")[:-8]), "layers.0.self_attn.o_proj"),
        (whole, "layers.3.mlp"),
    ):
        save_file(changed, directory / "adapter_model.safetensors")
        capsys.readouterr()
        assert main(["import", str(hf), str(tmp_path / "no"), "--lora", str(directory)]) == 2
        assert f"missing: model.{missing}" in capsys.readouterr().err


@pytest.mark.parametrize("trained_on", ["the text", "the whole model"])
@pytest.mark.parametrize("stored", ["the text", "the whole model"])
def test_an_adapter_of_a_vision_language_model(trained_on: str, stored: str, tmp_path: Path) -> None:
    """As published, with a tower and an MTP layer, of which transformers' class of the text has neither: the
    names of the layers are those of the class that an adapter was trained with."""
    seeing, mcore, back = tmp_path / "seeing", tmp_path / "mcore", tmp_path / "back"
    make_seeing(seeing, "qwen3_5", tied=False, seed=5)
    text = save_text_part(seeing, tmp_path / "text")
    kind = AutoModelForCausalLM if trained_on == "the text" else AutoModelForImageTextToText
    base = text if trained_on == "the text" else seeing
    begin = "model." if trained_on == "the text" else "model.language_model."
    options = {
        # of the text alone: the tower's layers have other names
        "target_modules": ["q_proj", "o_proj", "in_proj_qkv", "gate_proj", "down_proj"],
        # layer 1 alone has attention
        "alpha_pattern": {rf"^{re.escape(begin)}layers.1.self_attn.q_proj": 1.5},
        "rank_pattern": {rf"^{re.escape(begin)}layers.1.self_attn.o_proj": 3},
    }
    directory = adapter(base, tmp_path / "adapter", kind=kind, **options)
    model = PeftModel.from_pretrained(kind.from_pretrained(base, dtype=torch.float32), directory)
    merged = {
        name.replace("model.language_model.", "model."): tensor
        for name, tensor in model.merge_and_unload().state_dict().items()
    }
    hf = text if stored == "the text" else seeing
    run("import", hf, mcore, "--lora", directory)
    run("export", mcore, back)
    before, found = stored_tensors(hf), stored_tensors(back)
    changed = {name for name in before if not torch.equal(found[name], before[name])}
    assert len(changed) > 6 and not any(name.startswith(("mtp.", "model.visual.")) for name in changed)
    for name in before:
        plain = name.replace("model.language_model.", "model.")
        if not name.startswith(("mtp.", "model.visual.")):
            torch.testing.assert_close(found[name], merged[plain], rtol=1e-6, atol=1e-6, msg=name)


def without(tensors: dict[str, Tensor], beginning: str) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in tensors.items() if not name.startswith(beginning)}


@pytest.mark.parametrize(
    ("tied", "stored", "config", "said"),
    [
        (
            True,
            {"model.embed_tokens.weight": (101, 42)},
            {"modules_to_save": ["embed_tokens"]},
            "tie_word_embeddings is true",
        ),
        (
            False,
            {"lm_head.weight": (100, 42)},
            {"modules_to_save": ["lm_head"]},
            "lm_head.weight is [100, 42], lm_head.weight asks for",
        ),
        (
            False,
            {"model.embed_tokens.token_adapter.trainable_tokens_delta": (2, 42)},
            {},
            "does not say which rows",
        ),
        (
            False,
            {"model.embed_tokens.token_adapter.trainable_tokens_delta": (2, 42)},
            {"trainable_token_indices": [3, 101]},
            "the largest is 101, but the rows are 0 to 100",
        ),
        (
            False,
            {"lm_head.weight": (101, 42)},
            {},
            "base_model.model.lm_head.weight [101, 42]: not a factor of a LoRA module",
        ),
    ],
)
def test_saved_modules_that_do_not_fit(
    tied: bool,
    stored: dict[str, tuple[int, ...]],
    config: dict[str, Any],
    said: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    save_tiny(tmp_path / "hf", "llama_tied" if tied else "llama")
    adapter(tmp_path / "hf", tmp_path / "adapter", target_modules=["q_proj"])

    def add(tensors: dict[str, Tensor]) -> None:
        tensors.update({f"base_model.model.{name}": torch.randn(shape) for name, shape in stored.items()})

    assert said in refused(tmp_path, altered(tmp_path, tmp_path, config, add), tmp_path, capsys)


@pytest.mark.parametrize("kind", REFUSED)
def test_what_is_no_plain_lora(
    kind: str, trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, said = REFUSED[kind]
    assert said in refused(trained, altered(trained, tmp_path, config), tmp_path, capsys)


NAME = "base_model.model.model.layers.1.self_attn.q_proj.lora_B.weight"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda tensors: tensors.pop(NAME),
            "layers.1.self_attn.q_proj: has lora_A; lora_A and lora_B are needed",
        ),
        (
            lambda tensors: tensors.update({NAME.replace("lora_B", "lora_C"): torch.zeros(2)}),
            "lora_C.weight [2]: not a factor",
        ),
        (
            lambda tensors: tensors.update({NAME.replace("layers.1", "layers.9"): torch.zeros(2, 4)}),
            "no matrix model.layers.9.self_attn.q_proj",
        ),
        (
            lambda tensors: tensors.update({NAME.replace("B.weight", "magnitude_vector"): torch.zeros(2)}),
            "not a factor of a LoRA module",
        ),
        (
            lambda tensors: tensors.update({"model.layers.1.self_attn.q_proj.lora_B.weight": torch.zeros(2)}),
            "not a factor of a LoRA module",
        ),
        (
            lambda tensors: tensors.update({NAME: tensors[NAME].T.contiguous()}),
            "lora_B.weight is [4, 60], rank 4",
        ),
        (lambda tensors: tensors.update({NAME: tensors[NAME].to(torch.int32)}), "dtype: "),
        (lambda tensors: tensors.clear(), "it is empty"),
    ],
)
def test_tensors_that_do_not_fit(
    change: Callable[[dict[str, Tensor]], Any],
    said: str,
    trained: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert said in refused(
        trained, altered(trained, tmp_path, {"target_modules": ".*"}, change), tmp_path, capsys
    )


def test_directories_that_are_no_adapters(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "is not a directory" in refused(trained, tmp_path / "none", tmp_path, capsys)
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "adapter_model.bin").touch()
    assert re.search(
        "has no adapter_model.safetensors, only adapter_model.bin",
        refused(trained, tmp_path / "empty", tmp_path, capsys),
    )
    (tmp_path / "run").mkdir()
    directory = altered(trained, tmp_path, {})
    directory.rename(tmp_path / "run" / "checkpoint-500")
    assert "has no adapter_model.safetensors, only checkpoint-500/adapter_model.safetensors. Fix: give" in (
        refused(trained, tmp_path / "run", tmp_path, capsys)
    )
    directory = altered(trained, tmp_path, {})
    (directory / "adapter_config.json").write_text("[" * 100_000)
    assert "cannot be read as JSON" in refused(trained, directory, tmp_path, capsys)
    (directory / "adapter_config.json").write_text("[]")
    assert "holds a list, not a JSON object" in refused(trained, directory, tmp_path, capsys)


def test_an_adapter_is_no_model(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nor is a model beside which one lies: transformers would apply it."""
    for command in ("import", "inspect", "verify"):
        capsys.readouterr()
        assert (
            main(
                [command, str(trained / "adapter"), *([str(tmp_path / "out")] if command == "import" else [])]
            )
            == 2
        )
        said = capsys.readouterr().err
        assert (
            "holds a PEFT adapter (adapter_config.json). Fix: give the directory of the base model, and "
            "with --lora"
        ) in said
    save_tiny(tmp_path / "both", "qwen2")
    (tmp_path / "both" / "adapter_config.json").write_text("{}")
    assert main(["import", str(tmp_path / "both"), str(tmp_path / "out")]) == 2
    assert "holds a PEFT adapter" in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_a_tied_embedding_and_another_base(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_tiny(tmp_path / "hf", "llama")
    directory = adapter(tmp_path / "hf", tmp_path / "adapter", target_modules=["embed_tokens"])
    save_tiny(tmp_path / "tied" / "hf", "llama_tied")
    assert "embedding and output layer differ" in refused(tmp_path / "tied", directory, tmp_path, capsys)
    tensors = stored_tensors(tmp_path / "hf")
    tensors["model.embed_tokens.weight"][100, 3] += 1
    save_file(tensors, tmp_path / "hf" / "model.safetensors", metadata={"format": "pt"})
    assert "model.embed_tokens.weight of this model differs from that of the base model" in refused(
        tmp_path, directory, tmp_path, capsys
    )


@pytest.mark.parametrize("action", ["import", "export"])
@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_plan_says_what_is_written_then(
    action: str, dtype: str | None, trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run("import", trained / "hf", tmp_path / "mcore")
    source = trained / "hf" if action == "import" else tmp_path / "mcore"
    flags = ["--lora", str(trained / "adapter"), *(["--dtype", dtype] if dtype else [])]
    capsys.readouterr()
    run("plan", source, *flags, "--json")
    planned = json.loads(capsys.readouterr().out)
    run(action, source, tmp_path / "out", *flags, "--json")
    assert planned["direction"] == action and planned["bytes"] == json.loads(capsys.readouterr().out)["bytes"]
    assert {tensor["dtype"] for tensor in planned["tensors"]} == {dtype or "float32"}
    assert len(planned["files"]) == len(
        list((tmp_path / "out").glob("__[0-9]*.distcp" if action == "import" else "*.safetensors"))
    )
    refused_adapter = altered(trained, tmp_path, {"use_dora": True})
    assert main(["plan", str(source), "--lora", str(refused_adapter)]) == 2
    assert "use_dora = true" in capsys.readouterr().err


def test_another_adapter_is_another_plan(trained: Path, tmp_path: Path) -> None:
    from converters.checkpoint.source import open_source
    from converters.importing import plan_import

    source, directory = open_source(trained / "hf"), altered(trained, tmp_path, {})
    plans = [
        plan_import(source),
        plan_import(source, lora=trained / "adapter"),
        plan_import(source, lora=directory),
    ]
    assert len({str(plan.fingerprint) for plan in plans}) == 3


def test_stacks_of_experts_that_do_not_fit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_tiny(tmp_path / "hf", "qwen3_moe")
    adapter(
        tmp_path / "hf", tmp_path / "adapter", target_modules=[], target_parameters=["mlp.experts.down_proj"]
    )
    name = "base_model.model.model.layers.1.mlp.experts.lora_A.weight"
    one = altered(
        tmp_path, tmp_path, {}, lambda tensors: [tensors.pop(name), tensors.pop(name.replace("_A", "_B"))]
    )
    assert "missing: model.layers.1.mlp.experts.down_proj, which target_parameters lists" in refused(
        tmp_path, one, tmp_path, capsys
    )
    one.rename(tmp_path / "first")
    one = altered(
        tmp_path, tmp_path, {}, lambda tensors: tensors.update({name: tensors[name].T.contiguous()})
    )
    assert "model.layers.1.mlp.experts.down_proj needs [[28, 22], [42, 28]]" in refused(
        tmp_path, one, tmp_path, capsys
    )
    one.rename(tmp_path / "second")
    alone = "base_model.model.model.layers.1.mlp.experts.3.down_proj.lora_{}.weight"
    factors = {alone.format("A"): torch.zeros(4, 22), alone.format("B"): torch.zeros(42, 4)}
    one = altered(tmp_path, tmp_path, {}, lambda tensors: tensors.update(factors))
    assert "model.layers.1.mlp.experts.3.down_proj.weight is changed twice" in refused(
        tmp_path, one, tmp_path, capsys
    )


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda name: f"module.{name}", "names with module. in them, as DistributedDataParallel"),
        (
            lambda name: name.replace("base_model.model.", "base_model.model._orig_mod."),
            "names with _orig_mod. in them, as torch.compile",
        ),
        (
            lambda name: name.replace(".layers.", "._fsdp_wrapped_module.layers."),
            "names with _fsdp_wrapped_module. in them, as FSDP",
        ),
        (
            lambda name: name.replace(".weight", ".default.weight"),
            "names with default. in them, as PEFT in memory",
        ),
        (lambda name: name.removeprefix("base_model.model."), "no base_model.model. in front"),
    ],
)
def test_names_with_the_marks_of_wrappers(
    change: Callable[[str], str], said: str, trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def rename(tensors: dict[str, Tensor]) -> None:
        changed = {change(name): tensor for name, tensor in tensors.items()}
        tensors.clear()
        tensors.update(changed)

    assert said in refused(trained, altered(trained, tmp_path, {}, rename), tmp_path, capsys)


@pytest.mark.parametrize(
    "config",
    [
        {"lora_dtype": None, "lorap_lr_ratio": 16.0, "lorap_emb_lr": 1e-06, "modules_to_save": []},
        {
            "unsloth_version": "2024.4",
            "auto_mapping": {"base_model_class": "LlamaForCausalLM", "unsloth_fixed": True},
        },
        {
            "arrow_config": None,
            "alora_invocation_tokens": None,
            "corda_config": None,
            "peft_version": "0.18.0",
            "qalora_group_size": 16,
        },
        {"init_lora_weights": "Gaussian", "enable_lora": None, "merge_weights": False},
    ],
    ids=["ms-swift", "unsloth", "peft", "early peft"],
)
def test_configs_of_other_programs(config: dict[str, Any], trained: Path, tmp_path: Path) -> None:
    run("import", trained / "hf", tmp_path / "mcore", "--lora", altered(trained, tmp_path, config))
