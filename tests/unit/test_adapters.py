"""Adapters by themselves: PEFT's own go to Megatron and come back bit for bit, and those of Megatron-Bridge
become PEFT's."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import yaml
from safetensors.torch import load_file, save_file
from torch import Tensor

from converters.checkpoint.boxes import whole
from converters.command import main
from converters.torch_dist.reader import TorchDistCheckpoint
from tests.tiers import sampled
from tests.unit.converters_tiny import save_tiny, stored_tensors
from tests.unit.foreign_checkpoints import write_checkpoint
from tests.unit.test_lora import ATTENTION, adapter, merged_by_peft

DENSE = [*ATTENTION, "gate_proj", "up_proj", "down_proj"]
LATENT = ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]
CASES: dict[str, tuple[str, dict[str, Any], str]] = {
    "all": ("llama_all_biases", {"target_modules": DENSE}, "blocks, rank 12, stacked"),
    "two layers": (
        "qwen2_tied",
        {"target_modules": ["q_proj", "v_proj"], "layers_to_transform": [0, 2]},
        "blocks, rank 12, apart",
    ),
    "up alone": ("mistral", {"target_modules": ["up_proj"], "use_rslora": True}, "blocks, rank 8, stacked"),
    "nothing fused": ("llama", {"target_modules": ["o_proj", "down_proj"]}, "shared, rank 4, stacked"),
    "latent attention": ("deepseek_v3", {"target_modules": LATENT}, "shared, rank 4, apart"),
    "gated attention": ("qwen3_5_text", {"target_modules": ["q_proj", "v_proj"]}, "blocks, rank 12, apart"),
    "router": ("qwen3_moe", {"target_modules": ["k_proj", "mlp.gate"]}, "blocks, rank 12, stacked"),
}


def run(*argv: str | Path) -> None:
    assert main([*map(str, argv)]) == 0, argv


def factors(directory: Path) -> dict[str, Tensor]:
    return load_file(directory / "adapter_model.safetensors")


def tensors_in(directory: Path) -> dict[str, Tensor]:
    checkpoint = TorchDistCheckpoint(directory)
    return {key: checkpoint.read(key, whole(checkpoint.shape(key))) for key in checkpoint}


def assert_same(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert other[name].dtype == tensor.dtype and torch.equal(
            other[name].view(torch.uint8), tensor.view(torch.uint8)
        ), name


@sampled(3, case=["gated attention"])
@pytest.mark.parametrize("case", CASES)
def test_there_and_back_bit_for_bit(case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And merging is the same, from whichever side."""
    family, options, form = CASES[case]
    hf, peft, mcore = tmp_path / "hf", tmp_path / "peft", tmp_path / "mcore"
    save_tiny(hf, family)
    adapter(hf, peft, **options)
    capsys.readouterr()
    run("adapter", peft, mcore, "--hf-config", hf, "--json")
    said = json.loads(capsys.readouterr().out)
    assert f"{said['adapter_form']}, rank {said['rank']}, {said['layers']}" == form
    stacked = [
        key
        for key in tensors_in(mcore)
        if key.startswith("decoder.layers.") and not key.split(".")[2].isdigit()
    ]
    assert bool(stacked) == form.endswith("stacked")
    run("adapter", mcore, tmp_path / "back")
    assert_same(factors(peft), factors(tmp_path / "back"))
    assert (tmp_path / "back" / "adapter_config.json").read_bytes() == (
        peft / "adapter_config.json"
    ).read_bytes()
    for name, directory in (("one", peft), ("other", mcore)):
        run("import", hf, tmp_path / name, "--lora", directory)
        run("export", tmp_path / name, tmp_path / f"{name}-hf")
    assert_same(stored_tensors(tmp_path / "one-hf"), stored_tensors(tmp_path / "other-hf"))
    run("verify", hf, tmp_path / "one", "--lora", mcore)


def test_the_dtype_and_every_bit_of_it(tmp_path: Path) -> None:
    save_tiny(tmp_path / "hf", "qwen2")
    adapter(tmp_path / "hf", tmp_path / "peft", target_modules=ATTENTION)
    odd = {name: tensor.bfloat16() for name, tensor in factors(tmp_path / "peft").items()}
    name = "base_model.model.model.layers.1.self_attn.k_proj.lora_B.weight"
    odd[name].view(torch.int16)[:2, 0] = torch.tensor(
        [-(2**15), 0x7FC1]
    )  # minus zero, and a NaN with a payload
    save_file(odd, tmp_path / "peft" / "adapter_model.safetensors")
    run("adapter", tmp_path / "peft", tmp_path / "mcore", "--hf-config", tmp_path / "hf")
    run("adapter", tmp_path / "mcore", tmp_path / "back")
    assert_same(odd, factors(tmp_path / "back"))


RANK, ALPHA = 4, 6


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Base models by family: ``hf``, and ``base`` in Megatron's form."""
    root = tmp_path_factory.mktemp("bases")
    for family in ("llama", "qwen2"):
        save_tiny(root / family / "hf", family)
        run("import", root / family / "hf", root / family / "base")
    return root


def trained(
    base: Path,
    directory: Path,
    form: str,
    change: Callable[[dict[str, Tensor]], Any] = lambda tensors: None,
    **said: Any,
) -> Path:
    """What Megatron-Bridge leaves of LoRA training of a dense tiny model: adapters of random numbers, and
    ``run_config.yaml``."""
    generator, tensors = torch.Generator().manual_seed(1), {}
    fused = {
        "linear_qkv": {"adapter_q": 60, "adapter_k": 20, "adapter_v": 20},
        "linear_fc1": {"adapter_gate": 52, "adapter_up": 52},
    }
    for key, weight in tensors_in(base / "base").items():
        module = key.removesuffix(".weight")
        name = module.rpartition(".")[2]
        if weight.dim() == 3 and form in ("fused", "canonical"):
            parts = fused.get(name, {}) if form == "canonical" else {}
            for part, rows in (parts or {"": weight.shape[1]}).items():
                place = f"{module}.adapter.{part}{'.' if part else ''}"
                tensors[f"{place}linear_in.weight"] = (
                    torch.randn(3, RANK, weight.shape[2], generator=generator) * 0.2
                )
                tensors[f"{place}linear_out.weight"] = torch.randn(3, rows, RANK, generator=generator) * 0.2
    change(tensors)
    source = write_checkpoint(
        directory / "run" / "iter_0000007",
        tensors | {f"optimizer.state.exp_avg.{key}": value for key, value in tensors.items()},
    )
    kind = {"fused": "lora.LoRA", "canonical": "canonical_lora.CanonicalLoRA"}[form]
    peft = {
        "_target_": f"megatron.bridge.peft.{kind}",
        "alpha": ALPHA,
        "dim": RANK,
        "dropout": 0.1,
        "target_modules": ["linear_qkv"],
    }
    model = {"hf_model_id": "some/model", "tensor_model_parallel_size": said.pop("tensor_parallel", 1)}
    (source / "run_config.yaml").write_text(yaml.safe_dump({"model": model, "peft": {**peft, **said}}))
    (source.parent / "latest_checkpointed_iteration.txt").write_text("7")
    return source.parent


def merged_in_megatron(model: Path, directory: Path) -> dict[str, Tensor]:
    """The merged model: the products are added to Megatron's own matrices, as its forward pass adds them, and
    these are exported."""
    base, found = tensors_in(model / "base"), tensors_in(directory / "run" / "iter_0000007")

    def product(place: str) -> Tensor:
        return found[f"{place}.linear_out.weight"].double() @ found[f"{place}.linear_in.weight"].double()

    for key, weight in base.items():
        place = f"{key.removesuffix('.weight')}.adapter"
        if f"{place}.linear_in.weight" in found:
            delta = product(place)
        elif f"{place}.adapter_gate.linear_in.weight" in found:
            delta = torch.cat([product(f"{place}.adapter_gate"), product(f"{place}.adapter_up")], dim=1)
        elif f"{place}.adapter_q.linear_in.weight" in found:
            query, key_, value = (
                product(f"{place}.adapter_{letter}").unflatten(1, (2, -1)) for letter in "qkv"
            )  # two groups
            delta = torch.cat([query, key_, value], dim=2).flatten(1, 2)
        else:
            continue
        base[key] = (weight.double() + delta * (ALPHA / RANK)).float()
    write_checkpoint(directory / "merged", base)
    shutil.copytree(model / "base" / "huggingface", directory / "merged" / "huggingface")
    run("export", directory / "merged", directory / "merged-hf")
    return stored_tensors(directory / "merged-hf")


@pytest.mark.parametrize(("family", "form"), [("llama", "fused"), ("qwen2", "canonical")])
def test_what_megatron_bridge_trained_is_the_same_model_in_peft(
    family: str, form: str, bases: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hf, source = bases / family / "hf", trained(bases / family, tmp_path, form)
    assert main(["adapter", str(source), str(tmp_path / "peft")]) == 2
    assert "does not name the base model of the adapters" in capsys.readouterr().err
    run("adapter", source, tmp_path / "peft", "--hf-config", hf)
    config = json.loads((tmp_path / "peft" / "adapter_config.json").read_text())
    assert config["target_modules"] == sorted(DENSE) and config["base_model_name_or_path"] == "some/model"
    expected = merged_in_megatron(bases / family, tmp_path)
    run("import", hf, tmp_path / "with", "--lora", source)
    run("export", tmp_path / "with", tmp_path / "with-hf")
    for found in (
        merged_by_peft(hf, tmp_path / "peft", tmp_path / "by-peft"),
        stored_tensors(tmp_path / "with-hf"),
    ):
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            torch.testing.assert_close(found[name], tensor, rtol=1e-6, atol=1e-6)
    # the other way: adapters whose parts have one A need its ranks once
    run("adapter", tmp_path / "peft", tmp_path / "again", "--hf-config", hf)
    again, before = tensors_in(tmp_path / "again"), tensors_in(source / "iter_0000007")
    if form == "fused":
        assert_same(
            again, {key: tensor for key, tensor in before.items() if not key.startswith("optimizer.")}
        )
    assert {tensor.shape[1] for key, tensor in again.items() if key.endswith("linear_in.weight")} == {
        RANK if form == "fused" else 3 * RANK
    }


def test_some_modules_of_a_name_are_listed_one_by_one(bases: Path, tmp_path: Path) -> None:
    def apart(tensors: dict[str, Tensor]) -> None:
        for key in list(tensors):
            tensor = tensors.pop(key)
            if "linear_proj" in key or "linear_qkv" in key:
                numbers = (0, 2) if "linear_proj" in key else (0, 1, 2)
                tensors.update(
                    {key.replace("layers.", f"layers.{layer}."): tensor[layer].clone() for layer in numbers}
                )

    hf, source = bases / "llama" / "hf", trained(bases / "llama", tmp_path, "fused", apart)
    run("adapter", source, tmp_path / "peft", "--hf-config", hf)
    alone = ["model.layers.0.self_attn.o_proj", "model.layers.2.self_attn.o_proj"]
    assert json.loads((tmp_path / "peft" / "adapter_config.json").read_text())["target_modules"] == [
        "k_proj",
        *alone,
        "q_proj",
        "v_proj",
    ]
    base, merged = stored_tensors(hf), merged_by_peft(hf, tmp_path / "peft", tmp_path / "merged")
    changed = {name.removesuffix(".weight") for name in base if not torch.equal(base[name], merged[name])}
    assert changed == {
        *alone,
        *(f"model.layers.{layer}.self_attn.{letter}_proj" for layer in range(3) for letter in "qkv"),
    }


def test_dense_layers_of_a_mixture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What peft for transformers 4 saved of them goes there and back. Of a trainer's they are merged, and not
    given to a peft that takes them for experts."""
    save_tiny(tmp_path / "hf", "deepseek_v3")
    base = stored_tensors(tmp_path / "hf")
    modules = [
        "model.layers.0.mlp.up_proj",
        *(f"model.layers.{layer}.mlp.shared_experts.up_proj" for layer in (1, 2)),
    ]
    tensors = {}
    for module in modules:
        rows, columns = base[f"{module}.weight"].shape
        tensors[f"base_model.model.{module}.lora_A.weight"] = torch.randn(RANK, columns)
        tensors[f"base_model.model.{module}.lora_B.weight"] = torch.randn(rows, RANK)
    (tmp_path / "peft").mkdir()
    save_file(tensors, tmp_path / "peft" / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "target_modules": modules}
    (tmp_path / "peft" / "adapter_config.json").write_text(json.dumps(config))
    run("adapter", tmp_path / "peft", tmp_path / "mcore", "--hf-config", tmp_path / "hf")
    run("adapter", tmp_path / "mcore", tmp_path / "back")
    assert_same(tensors, factors(tmp_path / "back"))
    (tmp_path / "mcore" / "conversion.json").unlink()
    said = {"_target_": "megatron.bridge.peft.lora.LoRA", "dim": 2 * RANK, "alpha": 2 * ALPHA}
    (tmp_path / "mcore" / "run_config.yaml").write_text(yaml.safe_dump({"model": {}, "peft": said}))
    assert main(["adapter", str(tmp_path / "mcore"), str(tmp_path / "out")]) == 2
    assert "shared_experts.up_proj.lora_A.weight" in capsys.readouterr().err
    for name, directory in (("one", tmp_path / "peft"), ("other", tmp_path / "mcore")):
        run("import", tmp_path / "hf", tmp_path / name, "--lora", directory)
        run("export", tmp_path / name, tmp_path / f"{name}-hf")
    one, other = stored_tensors(tmp_path / "one-hf"), stored_tensors(tmp_path / "other-hf")
    changed = [name for name in base if not torch.equal(base[name], one[name])]
    assert sorted(changed) == sorted(f"{module}.weight" for module in modules)
    assert all(torch.equal(one[name], other[name]) for name in base)


def dropped(end: str) -> Callable[[dict[str, Tensor]], Any]:
    return lambda tensors: [tensors.pop(key) for key in list(tensors) if key.endswith(end)]


QKV, FC1 = "decoder.layers.self_attention.linear_qkv.adapter", "decoder.layers.mlp.linear_fc1.adapter"
EXPERTS = "decoder.layers.mlp.experts.experts.linear_fc1.adapter"


def added(key: str, *shape: int) -> Callable[[dict[str, Tensor]], Any]:
    return lambda tensors: tensors.update({key: torch.zeros(shape)})


def unchanged(tensors: dict[str, Tensor]) -> None: ...


REFUSED: dict[str, tuple[str, Callable[[dict[str, Tensor]], Any], dict[str, Any], str]] = {
    "one factor alone": (
        "fused",
        dropped("linear_qkv.adapter.linear_out.weight"),
        {},
        f"missing: {QKV}.linear_out.weight",
    ),
    "two forms": (
        "fused",
        added(f"{QKV}.adapter_q.linear_in.weight", 3, RANK, 42),
        {},
        "for the whole layer and others for its parts",
    ),
    "another model": ("fused", added(f"{QKV}.linear_out.weight", 3, 90, RANK), {}, "ask for [3, 100, 4]"),
    "two ranks": ("fused", added(f"{FC1}.linear_in.weight", 3, 8, 42), {}, "have several ranks"),
    "experts": ("fused", added(f"{EXPERTS}.linear_in.weight", 3, RANK, 42), {}, "holds adapters of experts"),
    "an unknown layer": (
        "fused",
        added("output_layer.adapter.linear_in.weight", RANK, 42),
        {},
        "of layers that the model does not have",
    ),
    "something else": ("fused", added("vision.weight", 3), {}, "holds more than adapters and the base model"),
    "DoRA": (
        "fused",
        unchanged,
        {"_target_": "megatron.bridge.peft.dora.DoRA"},
        "peft = DoRA, known are LoRA and CanonicalLoRA",
    ),
    "another run": ("fused", unchanged, {"dim": 8}, "dim = 8, the stored adapters have rank 4"),
    "no scale": ("fused", unchanged, {"alpha": None}, "lora_alpha = None"),
    "no number": (
        "canonical",
        unchanged,
        {"tensor_parallel": "many"},
        "saved with tensor_model_parallel_size = many",
    ),
    "rows exchanged": (
        "canonical",
        unchanged,
        {"tensor_parallel": 2},
        "saved with tensor_model_parallel_size = 2",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_no_adapter_of_peft(
    case: str, bases: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    form, change, said, expected = REFUSED[case]
    hf, source = bases / "llama" / "hf", trained(bases / "llama", tmp_path, form, change, **said)
    capsys.readouterr()
    for argv in (
        ["adapter", source, tmp_path / "out", "--hf-config", hf],
        ["import", hf, tmp_path / "out", "--lora", source],
    ):
        assert main([*map(str, argv)]) == 2
        error = capsys.readouterr().err
        assert expected in error and "Fix:" in error and not (tmp_path / "out").exists()


def test_nobody_says_the_scale(bases: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = trained(bases / "llama", tmp_path, "fused")
    (source / "iter_0000007" / "run_config.yaml").unlink()
    assert (
        main(["adapter", str(source), str(tmp_path / "out"), "--hf-config", str(bases / "llama" / "hf")]) == 2
    )
    assert "the scale (alpha) of the adapters" in capsys.readouterr().err


WITHOUT_FORM: dict[str, tuple[str, dict[str, Any], str]] = {
    "embedding": (
        "llama",
        {"target_modules": ["q_proj", "lm_head"]},
        "lm_head.weight: only linear layers of the transformer layers have adapters",
    ),
    "ranks": (
        "llama",
        {"target_modules": ["q_proj", "o_proj"], "rank_pattern": {"o_proj": 2}},
        "rank: 2, 4; Megatron has one",
    ),
    "scales": (
        "llama",
        {"target_modules": ["q_proj", "o_proj"], "alpha_pattern": {"o_proj": 2}},
        "scaling: 0.5, 1.5; Megatron has one",
    ),
    "stacks of experts": (
        "qwen3_moe",
        {"target_modules": [], "target_parameters": ["mlp.experts.down_proj"]},
        "adapters of experts, of which",
    ),
}


@pytest.mark.parametrize("case", WITHOUT_FORM)
def test_what_has_no_exact_form_in_megatron(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    family, options, said = WITHOUT_FORM[case]
    save_tiny(tmp_path / "hf", family)
    adapter(tmp_path / "hf", tmp_path / "peft", **options)
    assert (
        main(["adapter", str(tmp_path / "peft"), str(tmp_path / "out"), "--hf-config", str(tmp_path / "hf")])
        == 2
    )
    error = capsys.readouterr().err
    assert "has no exact form in Megatron" in error and said in error and not (tmp_path / "out").exists()


def test_patterns_with_the_names_of_another_class(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The checkpoint keeps the config as it is: read with the names of the model, it has another scale."""
    save_tiny(tmp_path / "hf", "llama")
    peft = adapter(tmp_path / "hf", tmp_path / "peft", target_modules=["q_proj"])
    named = {
        name.replace("model.layers", "model.language_model.layers"): tensor
        for name, tensor in factors(peft).items()
    }
    save_file(named, peft / "adapter_model.safetensors")
    run("adapter", peft, tmp_path / "plain", "--hf-config", tmp_path / "hf")
    config = json.loads((peft / "adapter_config.json").read_text())
    for change in (
        {"alpha_pattern": {r"^model\.language_model\..*q_proj": 9}},
        {"target_modules": r"model\.language_model\..*q_proj"},
    ):
        (peft / "adapter_config.json").write_text(json.dumps({**config, **change}))
        capsys.readouterr()
        assert main(["adapter", *map(str, (peft, tmp_path / "out", "--hf-config", tmp_path / "hf"))]) == 2
        assert "name it as another class does" in capsys.readouterr().err and not (tmp_path / "out").exists()


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("adapters")
    save_tiny(root / "hf", "qwen2")
    adapter(root / "hf", root / "peft", target_modules=["q_proj", "o_proj"])
    run("adapter", root / "peft", root / "mcore", "--hf-config", root / "hf")
    return root


@pytest.mark.parametrize("place", ["a factor", "a zero between the blocks"])
def test_what_was_changed_meanwhile_is_seen(
    place: str, converted: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tensors = tensors_in(converted / "mcore")
    key = f"{QKV}.linear_out.weight"
    row, rank = (3, 0) if place == "a factor" else (3, 5)
    tensors[key][1, row, rank] += 1
    copied = write_checkpoint(tmp_path / "mcore", tensors)
    shutil.copytree(converted / "mcore" / "huggingface", copied / "huggingface")
    shutil.copyfile(converted / "mcore" / "conversion.json", copied / "conversion.json")
    assert main(["adapter", str(copied), str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert (
        "does not match its conversion.json" in error
        and (key if rank else "layers.1.self_attn.q_proj.lora_B") in error
    )


def test_verify_compares_adapters(
    converted: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    peft, mcore, hf = converted / "peft", converted / "mcore", converted / "hf"
    run("adapter", peft, tmp_path / "other", "--hf-config", hf)
    assert "blocks: 3 of rank" in capsys.readouterr().out
    run("verify", peft, mcore)
    run("verify", mcore, tmp_path / "other")
    assert capsys.readouterr().out.count("tensors: equal bit for bit") == 2
    run("verify", mcore)
    assert "tensors: match conversion.json" in capsys.readouterr().out
    assert main(["verify", str(peft)]) == 2 and "verify compares two adapters" in capsys.readouterr().err
    shutil.copytree(peft, tmp_path / "changed")
    tensors = factors(peft)
    first, second = list(tensors)[:2]
    tensors[first][0, 0] += 1
    del tensors[second]
    save_file(tensors, tmp_path / "changed" / "adapter_model.safetensors")
    config = json.loads((peft / "adapter_config.json").read_text())
    # the order of target_modules, which PEFT keeps as a set, is no difference
    changes = {"lora_alpha": 99, "target_modules": config["target_modules"][::-1]}
    (tmp_path / "changed" / "adapter_config.json").write_text(json.dumps(config | changes))
    assert main(["verify", str(tmp_path / "changed"), str(mcore)]) == 1
    said = capsys.readouterr().out
    assert said.startswith("3 differences") and f"values: {first}" in said
    assert f"only in one: {second}" in said and "config: lora_alpha: 99 and" in said


def test_an_adapter_of_another_model_names_its_base(
    converted: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_tiny(tmp_path / "other", "llama", hidden_size=48)
    argv = ["adapter", converted / "peft", tmp_path / "out", "--hf-config", tmp_path / "other"]
    assert main([*map(str, argv)]) == 2
    said = capsys.readouterr().err
    assert "does not fit this llama model" in said and "base_model_name_or_path = " in said


def test_targets_and_sources(converted: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def refused(*argv: str | Path) -> str:
        assert main([*map(str, argv)]) == 2
        return capsys.readouterr().err

    peft, mcore, hf = converted / "peft", converted / "mcore", converted / "hf"
    assert "pass --hf-config DIRECTORY" in refused("adapter", peft, tmp_path / "out")
    assert "overlap" in refused("adapter", peft, peft / "inside", "--hf-config", hf)
    assert "exists" in refused("adapter", mcore, peft)
    (tmp_path / "letters").mkdir()
    (tmp_path / "letters" / "a.txt").touch()
    assert "will not be overwritten" in refused("adapter", mcore, tmp_path / "letters", "--overwrite")
    assert "holds no torch_dist checkpoint" in refused("adapter", tmp_path / "letters", tmp_path / "out")
    assert "holds the LoRA adapters of its trainer" in refused("export", mcore, tmp_path / "out")
    assert "converters adapter converts the adapter alone" in refused("import", peft, tmp_path / "out")
    run("adapter", mcore, tmp_path / "again")
    run("adapter", mcore, tmp_path / "again", "--overwrite")
    # transformers' trainer keeps its checkpoints in the directory of the adapter.
    (tmp_path / "again" / "checkpoint-500").mkdir()
    (tmp_path / "again" / "checkpoint-500" / "optimizer.pt").touch()
    assert "checkpoint-500/optimizer.pt" in refused("adapter", mcore, tmp_path / "again", "--overwrite")
    run("adapter", peft, tmp_path / "mcore", "--hf-config", hf)
    run("adapter", peft, tmp_path / "mcore", "--hf-config", hf, "--overwrite")
    (tmp_path / "mcore" / "iter_0000500").mkdir()
    (tmp_path / "mcore" / "iter_0000500" / ".metadata").touch()
    again = ("adapter", peft, tmp_path / "mcore", "--hf-config", hf, "--overwrite")
    assert "iter_0000500/.metadata" in refused(*again)
    save_tiny(tmp_path / "other", "llama", hidden_size=36)
    assert "do not fit the model" in refused(
        "adapter", mcore, tmp_path / "out", "--hf-config", tmp_path / "other"
    )
    run("import", hf, tmp_path / "base")
    assert "holds no adapters" in refused("import", hf, tmp_path / "out", "--lora", tmp_path / "base")


def test_torch_itself_reads_what_is_written(converted: Path) -> None:
    expected = tensors_in(converted / "mcore")
    found = {key: torch.zeros_like(tensor) for key, tensor in expected.items()}
    dcp.load(found, checkpoint_id=converted / "mcore", no_dist=True)
    assert_same(expected, found)
