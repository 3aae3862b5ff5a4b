"""Every configuration in configs/: a dry run of it passes without a network, and those for real sizes fit the
GPUs they name."""

from __future__ import annotations

import re
import shutil
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM

from converters.families.hf_config import make_hf_config
from megarl.cli import load_and_check, main
from megarl.config import published_config, read_model_facts
from megarl.config.layout import Layout
from megarl.config.parameters import expert_layer_parameters, stage_parameters
from megarl.config.plan import fullest_moment, memory_of_run
from megarl.config.policy import MOMENT_KEYS, STATE_KEYS
from megarl.config.tables import KNOWN_MODELS
from megarl.config.validate import doubt_of_memory
from megarl.quickstart.material import make_config
from tests.tiers import sampled

CONFIGS = Path(__file__).parents[2] / "configs"
RECIPES = sorted(CONFIGS.glob("*.yaml"))
QUICKSTART = [
    CONFIGS / "quickstart" / f"{name}.yaml"
    for name in ("sft", "grpo", "ppo", "distillation", "dpo", "rm", "calculator-sft", "calculator-grpo")
]
# laid over a recipe by --with: the files, and what they are laid over
LAYERS = [
    *[
        (CONFIGS / "base" / f"{backend}.yaml", CONFIGS / "grpo-qwen2.5-1.5b-megatron.yaml")
        for backend in ("dtensor", "fsdp1")
    ],
    *[
        (CONFIGS / "quickstart" / f"{backend}.yaml", recipe)
        for backend in ("dtensor", "fsdp1")
        for recipe in QUICKSTART
    ],
]
ADAPTERS = CONFIGS / "quickstart" / "lora.yaml"
# algorithms of the GRPO family, laid over a GRPO recipe
FAMILY = sorted(
    CONFIGS / "base" / f"{name}.yaml"
    for name in (
        "gspo",
        "gspo-token",
        "cispo",
        "dr-grpo",
        "rloo",
        "gdpo",
        "reinforce-plus-plus",
        "dapo",
        "trl",
    )
)
# the same for what generates, with what a user writes beside them
HALF_A_NODE = "policy.generation.colocated.resources.gpus_per_node=4"
ENGINES = [
    (CONFIGS / "base" / "vllm.yaml", CONFIGS / "grpo-qwen2.5-1.5b-megatron.yaml", []),
    (CONFIGS / "base" / "vllm-apart.yaml", CONFIGS / "grpo-qwen2.5-1.5b-megatron.yaml", [HALF_A_NODE]),
    (CONFIGS / "quickstart" / "vllm.yaml", CONFIGS / "quickstart" / "grpo.yaml", []),
    (CONFIGS / "quickstart" / "vllm-apart.yaml", CONFIGS / "quickstart" / "grpo.yaml", []),
    (
        CONFIGS / "quickstart" / "asynchronous.yaml",
        CONFIGS / "quickstart" / "grpo.yaml",
        ["--with", str(CONFIGS / "quickstart" / "vllm-apart.yaml")],
    ),
]
GIB = 2**30
# 85 % of an H100 with 80 GB (81559 MiB): the rest is for CUDA, NCCL and fragmentation, which the estimate
# leaves out
USABLE = int(0.85 * 81559 * 2**20)
# the totals in the index of each model's safetensors on the hub
PUBLISHED_PARAMETERS = {
    "Qwen/Qwen2.5-0.5B": 494_032_768,
    "Qwen/Qwen2.5-1.5B": 1_543_714_304,
    "Qwen/Qwen2.5-3B": 3_085_938_688,
    "Qwen/Qwen2.5-7B": 7_615_616_512,
    "Qwen/Qwen2.5-14B": 14_770_033_664,
    "Qwen/Qwen2.5-32B": 32_763_876_352,
    "Qwen/Qwen2.5-72B": 72_706_203_648,
    "Qwen/Qwen3-0.6B": 596_049_920,
    "Qwen/Qwen3-1.7B": 1_720_574_976,
    "Qwen/Qwen3-4B": 4_022_468_096,
    "Qwen/Qwen3-8B": 8_190_735_360,
    "Qwen/Qwen3-14B": 14_768_307_200,
    "Qwen/Qwen3-32B": 32_762_123_264,
    "Qwen/Qwen3-30B-A3B": 30_532_122_624,
    "Qwen/Qwen3-235B-A22B": 235_093_634_560,
    "deepseek-ai/DeepSeek-R1": 671_026_404_352,
    "deepseek-ai/DeepSeek-R1-Distill-Llama-8B": 8_030_261_248,
    "deepseek-ai/DeepSeek-R1-Distill-Llama-70B": 70_553_706_496,
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B": 1_777_088_000,
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-7B": 7_615_616_512,
    "deepseek-ai/DeepSeek-V3": 671_026_404_352,
    "HuggingFaceTB/SmolLM2-1.7B": 1_711_376_384,
    "meta-llama/Llama-3.1-8B": 8_030_261_248,
    "meta-llama/Llama-3.1-70B": 70_553_706_496,
    "meta-llama/Llama-3.2-1B": 1_235_814_400,
    "meta-llama/Llama-3.2-3B": 3_212_749_824,
    "meta-llama/Llama-3.3-70B": 70_553_706_496,
    "microsoft/phi-4": 14_659_507_200,
    "mistralai/Mistral-7B-v0.3": 7_248_023_552,
    "openai/gpt-oss-20b": 20_914_757_184,
    "openai/gpt-oss-120b": 116_829_156_672,
    # 110,468,824,832 with the layer that predicts a second token, which has an embedding and an output layer
    # of its own
    "zai-org/GLM-4.5-Air": 110_468_824_832 - 3_616_579_328,
}
"""By name, without ``-Instruct``."""
LAYOUTS = {
    "grpo-qwen2.5-1.5b-1gpu-megatron": Layout(1, 1, 1, 1, 1),
    "grpo-qwen2.5-7b-8gpu-megatron": Layout(1, 4, 1, 2, 8),
    "grpo-qwen3-30b-a3b-2x8gpu-megatron": Layout(2, 8, 1, 1, 8),
    "grpo-llama3.1-70b-8x8gpu-megatron": Layout(2, 4, 1, 8, 8),
}


@pytest.fixture(autouse=True)
def no_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No host can be reached, and nothing was downloaded before."""
    from huggingface_hub import constants

    def refuse(*arguments: Any) -> None:
        raise AssertionError(f"a dry run wants to reach {arguments[1:]}")

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "empty"))
    monkeypatch.setattr(socket.socket, "connect", refuse)


@pytest.fixture
def model_of_quickstart(tmp_path: Path) -> Path:
    make_config(vocab_size=60, pad_token_id=0, eos_token_id=1).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def models(recipe: Path, model: Path) -> list[str]:
    """Overrides that give a configuration of the quickstart the models that its parts before would have left;
    none to a recipe."""
    names = ["policy", *(["teacher"] if recipe.stem == "distillation" else [])]
    return [f"{name}.model_name={model}" for name in names] if recipe in QUICKSTART else []


def dry_run(capsys: pytest.CaptureFixture[str], recipe: Path, *arguments: str) -> str:
    assert main(["train", str(recipe), "--dry-run", *arguments]) == 0, capsys.readouterr().err
    return capsys.readouterr().out


@sampled(6)
@pytest.mark.parametrize("recipe", RECIPES, ids=[recipe.stem for recipe in RECIPES])
def test_a_dry_run_of_every_recipe_passes_and_estimates_its_memory(
    recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = dry_run(capsys, recipe)
    assert "peak" in out and "its published sizes are used" in " ".join(out.split())


def test_too_few_nodes_for_a_recipe_are_told_by_their_number(capsys: pytest.CaptureFixture[str]) -> None:
    recipe = next(recipe for recipe in RECIPES if recipe.stem == "grpo-llama3.1-70b-8x8gpu-megatron")
    assert main(["train", str(recipe), "--dry-run", "cluster.num_nodes=1"]) == 2
    assert "= 16; at least 2 nodes of 8 ranks are needed. Fix: " in " ".join(capsys.readouterr().err.split())
    assert (
        main(["train", str(recipe), "--dry-run", "policy.megatron_cfg.pipeline_model_parallel_size=3"]) == 2
    )
    assert "= 24. Fix: write policy.megatron_cfg.pipeline_model_parallel_size=4" in capsys.readouterr().err


# a refit of vLLM's gated delta nets is not built
WITH_VLLM = [
    recipe
    for recipe in RECIPES
    if recipe.stem.startswith("grpo") and "qwen3.5" not in recipe.stem and "next" not in recipe.stem
]


@sampled(3, recipe=[recipe for recipe in WITH_VLLM if "asynchronous" in recipe.stem])
@pytest.mark.parametrize("recipe", WITH_VLLM, ids=lambda recipe: recipe.stem)
def test_a_recipe_generates_with_vllm_and_without_it_when_the_backend_is_taken_away(
    recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shared, apart = "a device that policy and engine share", "engine's weights, a device"
    said = dry_run(capsys, recipe)
    assert (apart if "asynchronous" in recipe.stem else shared) in said
    assert "engines x devices of each" in said
    assert "a device that policy and engine share" not in dry_run(
        capsys, recipe, "~policy.generation.backend"
    )


@pytest.mark.parametrize(
    ("overrides", "engines"),
    [
        ([], "4 x 1"),
        (["policy.generation.vllm_cfg.tensor_parallel_size=2"], "2 x 2"),
        (["~policy.generation.backend"], "4 x 1"),
        (["~policy.generation.backend", "policy.generation.engine_cfg={tensor_parallel_size: 2}"], "2 x 2"),
    ],
)
def test_a_dry_run_counts_the_engines_and_their_devices(
    overrides: list[str], engines: str, capsys: pytest.CaptureFixture[str]
) -> None:
    [recipe] = [recipe for recipe in WITH_VLLM if "asynchronous" in recipe.stem]
    row = next(
        line for line in dry_run(capsys, recipe, *overrides).splitlines() if "engines x devices" in line
    )
    assert engines in row


def _configuration(said: str) -> str:
    """The YAML in what a dry run says."""
    return said.split(" ranks:")[0].split("\n", 1)[1].rsplit("\n", 1)[0]


@pytest.mark.parametrize("recipe", QUICKSTART, ids=[recipe.stem for recipe in QUICKSTART])
def test_a_dry_run_of_the_quickstart_passes(
    recipe: Path, model_of_quickstart: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "published" not in dry_run(capsys, recipe, *models(recipe, model_of_quickstart))


@sampled(4)
@pytest.mark.parametrize(
    ("layer", "recipe"), LAYERS, ids=[f"{layer.stem}-over-{recipe.stem}" for layer, recipe in LAYERS]
)
def test_a_dry_run_of_every_layer_passes(
    layer: Path, recipe: Path, model_of_quickstart: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    overrides = models(recipe, model_of_quickstart)
    dtensor = yaml.safe_load(_configuration(dry_run(capsys, recipe, "--with", str(layer), *overrides)))
    assert dtensor["policy"]["dtensor_cfg"]["enabled"] is (layer.stem == "dtensor")
    assert not dtensor["policy"]["megatron_cfg"]["enabled"]


@sampled(2)
@pytest.mark.parametrize("layer", FAMILY, ids=[layer.stem for layer in FAMILY])
def test_a_dry_run_of_every_algorithm_of_the_family_passes(
    layer: Path, model_of_quickstart: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Over a recipe that says nothing of advantages, and over one that says how they are made."""
    recipes, sections = [CONFIGS / "grpo-qwen2.5-1.5b-1gpu-megatron.yaml"], {"grpo", "loss_fn"}
    if layer.stem == "gdpo":
        # for several rewards, of long answers
        sections.add("env")
    else:
        recipes.append(CONFIGS / "quickstart" / "grpo.yaml")
    for recipe in recipes:
        overrides = models(recipe, model_of_quickstart)
        plain, changed = (
            yaml.safe_load(_configuration(dry_run(capsys, recipe, *words, *overrides)))
            for words in ([], ["--with", str(layer)])
        )
        assert {name for name in changed if changed[name] != plain[name]} <= sections and changed != plain


@pytest.mark.parametrize(
    ("layer", "recipe", "beside"),
    ENGINES,
    ids=[f"{layer.stem}-over-{recipe.stem}" for layer, recipe, _ in ENGINES],
)
def test_a_dry_run_of_every_engine_passes(
    layer: Path,
    recipe: Path,
    beside: list[str],
    model_of_quickstart: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    overrides = models(recipe, model_of_quickstart)
    out = dry_run(capsys, recipe, "--with", str(layer), *overrides, *beside)
    assert "backend: vllm" in out
    ranks = {"vllm-apart-over-grpo-qwen2.5-1.5b-megatron": 4, "vllm-over-grpo-qwen2.5-1.5b-megatron": 8}.get(
        f"{layer.stem}-over-{recipe.stem}", 2
    )
    assert f"{ranks} ranks: pipeline" in out


def test_a_dry_run_of_adapters_passes(model_of_quickstart: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """On either backend that has them; the reference policy then takes no memory."""
    recipe = CONFIGS / "quickstart" / "grpo.yaml"
    for layers in ([], ["--with", str(CONFIGS / "quickstart" / "dtensor.yaml")]):
        out = dry_run(capsys, recipe, *layers, "--with", str(ADAPTERS), *models(recipe, model_of_quickstart))
        assert yaml.safe_load(_configuration(out))["policy"]["peft"]["dim"] == 16


def test_no_configuration_is_left_out() -> None:
    reached: set[Path] = set()
    pending = [
        *RECIPES,
        *QUICKSTART,
        *FAMILY,
        *[layer for layer, _ in LAYERS],
        *[layer for layer, _, _ in ENGINES],
        ADAPTERS,
    ]
    # what megarl.train lays over an algorithm: tests/unit/test_library.py
    pending.append(CONFIGS / "base/small.yaml")
    while pending:
        path = pending.pop().resolve()
        if path not in reached:
            reached.add(path)
            defaults = yaml.safe_load(path.read_text()).get("defaults", [])
            pending += [
                path.parent / name for name in ([defaults] if isinstance(defaults, str) else defaults)
            ]
    assert {path.resolve() for path in CONFIGS.rglob("*.y*ml")} == reached


@pytest.mark.parametrize("recipe", RECIPES, ids=[recipe.stem for recipe in RECIPES])
def test_every_rank_of_a_recipe_fits_a_gpu_of_80_gb(recipe: Path) -> None:
    layout, rows = memory_of_run(load_and_check(str(recipe), []))
    assert {row.stage for row in rows} == set(range(layout.pipeline))
    assert 0 < max(row.peak for row in rows) <= USABLE, [f"{row.peak / GIB:.1f} GiB" for row in rows]


@pytest.mark.parametrize(
    "recipe", [recipe for recipe in RECIPES if "gb-" in recipe.stem], ids=lambda recipe: recipe.stem
)
def test_a_recipe_for_a_size_of_gpu_fits_it(recipe: Path) -> None:
    """With what an engine keeps; and with float32 moments, or all weights, it would not, where it has
    less."""
    config = load_and_check(str(recipe), [])
    assert f"{config['cluster']['device_memory_gib']:g}gb" in recipe.stem
    assert doubt_of_memory(config) is None
    optimizer = "policy.megatron_cfg.optimizer"
    if "80gb" not in recipe.stem or "lora" in recipe.stem:
        more = [f"{optimizer}.{key}=float32" for key in STATE_KEYS]
        if "lora" in recipe.stem:
            more = ["policy.peft.enabled=false"]
        assert doubt_of_memory(load_and_check(str(recipe), [*more, "cluster.memory_check=warn"])) is not None


def test_the_plan_of_a_mixture_of_30b_on_one_node() -> None:
    """With states in host memory, and with moments of 16 bits on the device, as the recipe's comment says."""
    recipe, optimizer = (
        CONFIGS / "grpo-qwen3-30b-a3b-8gpu-80gb-megatron.yaml",
        "policy.megatron_cfg.optimizer",
    )
    moments = [f"{optimizer}.{key}=bfloat16" for key in MOMENT_KEYS]
    plans = []
    for changes in (
        [],
        [f"{optimizer}.optimizer_offload_fraction=0", *moments],
        [f"{optimizer}.optimizer_offload_fraction=0"],
    ):
        moment = fullest_moment(load_and_check(str(recipe), changes))
        assert moment is not None
        plans.append(moment.total / GIB)
    assert plans[0] < 62 and plans[1] < 70 and plans[2] > 78
    assert f"({plans[1]:.1f} GiB per GPU)" in recipe.read_text()


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_layouts_of_real_sizes_are_the_documented_ones(name: str) -> None:
    config = load_and_check(str(CONFIGS / f"{name}.yaml"), [])
    layout, _ = memory_of_run(config)
    assert layout == LAYOUTS[name]
    ranks = [layout.coordinates(rank) for rank in range(layout.world_size)]
    tensor_groups = {(place.pipeline, place.data, place.context) for place in ranks}
    for group in tensor_groups:
        nodes = {place.node for place in ranks if (place.pipeline, place.data, place.context) == group}
        assert len(nodes) == 1, f"tensor-parallel group {group} is spread over nodes {nodes}"


@pytest.mark.parametrize(
    ("name", "override"),
    [
        (
            "grpo-qwen2.5-7b-8gpu-megatron",
            [
                "policy.megatron_cfg.tensor_model_parallel_size=1",
                "policy.megatron_cfg.sequence_parallel=false",
            ],
        ),
        ("grpo-llama3.1-70b-8x8gpu-megatron", ["policy.megatron_cfg.pipeline_model_parallel_size=1"]),
    ],
)
def test_what_the_recipes_say_would_not_fit_does_not(name: str, override: list[str]) -> None:
    _, rows = memory_of_run(load_and_check(str(CONFIGS / f"{name}.yaml"), override))
    assert max(row.peak for row in rows) > USABLE


@pytest.mark.parametrize("model", KNOWN_MODELS)
def test_known_sizes_give_the_published_number_of_parameters(model: str) -> None:
    facts = read_model_facts(model)
    assert facts is not None
    experts = (
        sum(facts.is_sparse(layer) for layer in range(facts.num_layers))
        * expert_layer_parameters(facts, 1, 1)
        if facts.num_experts
        else 0
    )
    published = PUBLISHED_PARAMETERS.get(model.replace("-Instruct", ""))
    assert stage_parameters(facts, 1, 0, [range(facts.num_layers)]) + experts == (
        published or parameters_in_transformers(model)
    )


def parameters_in_transformers(model: str) -> int:
    """Of the text, without the layer that predicts further tokens: what these models' indices hold, other
    parts are added to."""
    config = make_hf_config(KNOWN_MODELS[model]).get_text_config()
    assert config.layer_types.count("linear_attention") == 3 * config.num_hidden_layers // 4
    with torch.device("meta"):
        return int(AutoModelForCausalLM.from_config(config).num_parameters())


def test_what_is_on_the_disk_goes_before_what_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    assert published_config("Qwen/Qwen2.5-7B") == KNOWN_MODELS["Qwen/Qwen2.5-7B"]
    snapshot = tmp_path / "models--Qwen--Qwen2.5-7B" / "snapshots" / ("0" * 40)
    make_config(vocab_size=60, pad_token_id=0, eos_token_id=1).save_pretrained(snapshot)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("0" * 40)
    assert published_config("Qwen/Qwen2.5-7B") is None
    facts = read_model_facts("Qwen/Qwen2.5-7B")
    assert facts is not None and facts.vocab_size == 60
    shutil.rmtree(snapshot.parents[1])
    assert published_config("owner/unknown") is None and read_model_facts("owner/unknown") is None


def test_the_readme_s_recipes_for_a_card_of_24_gb_and_their_plans() -> None:
    text = (CONFIGS.parent / "README.md").read_text()
    names = list(dict.fromkeys(re.findall(r"grpo-\S*24gb-megatron", text)))
    figures = re.search(r"the plan is ([\d.]+) and ([\d.]+) GiB at the fullest moment", text)
    assert figures is not None and {f"{name}.yaml" for name in names} == {
        path.name for path in CONFIGS.glob("*24gb*.yaml")
    }
    plans = [fullest_moment(load_and_check(str(CONFIGS / f"{name}.yaml"), [])) for name in names]
    assert [f"{moment.total / GIB:.1f}" for moment in plans if moment is not None] == list(figures.groups())
