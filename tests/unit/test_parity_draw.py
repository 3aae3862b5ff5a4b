"""Random cases: the same for the same seed, all of them possible, and between them they have every feature
there is."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from megarl.errors import ConfigError
from megarl.parity import possible
from megarl.parity.case import BACKENDS, CHOICES, SPARSE, Case, idle_fields
from megarl.parity.coverage import FEATURES, Coverage, features
from megarl.parity.draw import Drawer
from megarl.parity.lines import parse
from megarl.parity.models import ModelShelf
from megarl.parity.possible import absent_model_class, refusal
from megarl.parity.reference import load_model
from tests.tiers import slow


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> ModelShelf:
    return ModelShelf(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def drawn(shelf: ModelShelf) -> list[Case]:
    drawer = Drawer(shelf, BACKENDS, 8)
    return [drawer.draw(0, number) for number in range(250)]


def test_cases_are_possible_and_within_the_world(drawn: list[Case], shelf: ModelShelf) -> None:
    for case in drawn:
        assert refusal(case, shelf) is None and case.world <= 8 and not idle_fields(case), str(case)


def test_a_case_depends_on_seed_and_number_alone(drawn: list[Case], shelf: ModelShelf) -> None:
    other = Drawer(shelf, BACKENDS, 8)
    assert other.draw(0, 17) == drawn[17] == other.draw(0, 17)
    assert other.draw(1, 17) != drawn[17]


def test_cases_survive_their_lines(drawn: list[Case]) -> None:
    assert all(parse(str(case)) == case for case in drawn)


def test_every_feature_and_choice_is_drawn(drawn: list[Case]) -> None:
    seen = Counter(feature for case in drawn for feature in features(case))
    assert set(FEATURES) - set(seen) == ({"HybridModel"} if absent_model_class() else set())
    for key, choices in CHOICES.items():
        missing = {"hybrid"} if key == "model_class" and absent_model_class() else set()
        assert {getattr(case, key) for case in drawn} == set(choices) - missing, key


@pytest.mark.parametrize(("version", "has_it"), [("0.16.1", False), ("0.19.2", True), ("0.20.0rc1", True)])
def test_hybrid_models_are_drawn_where_megatron_core_has_one(
    version: str, has_it: bool, shelf: ModelShelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And nothing else about the cases is another."""
    before = [Drawer(shelf, ["megatron"], 4).draw(7, number) for number in range(12)]
    monkeypatch.setattr(possible, "installed_version", lambda _: version)
    drawn = [Drawer(shelf, ["megatron"], 4).draw(7, number) for number in range(12)]
    assert [replace(case, model_class="gpt") for case in drawn] == [
        replace(case, model_class="gpt") for case in before
    ]
    assert {case.model_class for case in drawn} == ({"gpt", "hybrid"} if has_it else {"gpt"})
    refused = refusal(Case(model_class="hybrid"), shelf)
    assert (refused is None) is has_it
    said = (
        f"case.model_class = 'hybrid': Megatron-Core {version} has no HybridModel. Fix: write gpt or "
        "null, or install"
    )
    assert refused is None or f"{said} megatron-core 0.19.2 or newer, for Python 3.12" in str(refused)


def test_mixtures_and_16_bit_have_their_shares(drawn: list[Case]) -> None:
    mixtures = [case for case in drawn if case.family in SPARSE]
    assert len(mixtures) >= len(drawn) * 60 / 500
    for together in ("ep", "etp", "freeze"):
        assert sum(getattr(case, together) > getattr(Case(), together) for case in mixtures) >= 3, together
    assert any(case.ep > 1 and case.cp > 1 for case in mixtures)
    balanced = [case for case in mixtures if case.balance != "none"]
    assert sum(case.topk < case.experts for case in balanced) > 0.7 * len(balanced), (
        "nothing is to be balanced among all experts"
    )
    assert any(case.topk == case.experts for case in mixtures)
    assert 0.15 < sum(case.half for case in drawn) / len(drawn) < 0.4
    assert all(case.lr > 0.002 for case in drawn if case.half)


@slow
def test_given_words_decide_what_is_drawn_with_them(shelf: ModelShelf) -> None:
    drawer = Drawer(shelf, BACKENDS, 4, {"precision": "float16", "family": "mixtral"})
    cases = [drawer.draw(5, number) for number in range(5)]
    assert all(
        case.half and case.experts >= 2 and case.backend == "megatron" and case.lr > 0.002 for case in cases
    )


@slow
def test_the_rules_decide_and_are_counted(shelf: ModelShelf) -> None:
    drawer = Drawer(shelf, ["dtensor"], 2, {"family": "mixtral", "experts": 2, "topk": 2})
    with pytest.raises(ConfigError, match=r"no case in \d+ draws for dtensor"):
        drawer.draw(0, 0)
    assert drawer.refusals


@slow
def test_given_words_are_in_every_case(shelf: ModelShelf) -> None:
    drawer = Drawer(shelf, BACKENDS, 4, {"cp": 2, "batching": "packed"})
    cases = [drawer.draw(3, number) for number in range(10)]
    assert all(case.cp == 2 and case.batching == "packed" and case.backend != "fsdp1" for case in cases)


def test_coverage_counts_features_and_their_pairs() -> None:
    coverage = Coverage()
    coverage.add(Case(tp=2, dp=2))
    coverage.add(Case(tp=2, backend="dtensor"))
    counted = coverage.to_json()
    assert counted["features"]["megatron"]["tensor parallel"] == 1
    assert counted["features"]["dtensor"]["data parallel"] == 0
    assert counted["pairs"]["megatron"]["tensor parallel + data parallel"] == 1
    assert "fsdp1" not in counted["features"]


def test_coverage_keeps_16_bit_apart() -> None:
    coverage = Coverage()
    coverage.add(Case(tp=2))
    coverage.add(Case(tp=2, precision="bfloat16"))
    counted = coverage.to_json()["features"]
    assert [counted[column]["tensor parallel"] for column in ("megatron", "megatron 16 bit")] == [1, 1]
    assert counted["megatron"]["precision: bfloat16"] == 0 and counted["megatron 16 bit"]["all"] == 1


@pytest.mark.parametrize(
    ("case", "feature"),
    [
        (Case(masked="rank", dp=2), "zero valid tokens on a rank"),
        (Case(masked="all"), "zero valid tokens"),
        (Case(loss="pg", segments=3, mbs=2), "segments that share an advantage"),
        (Case(family="mixtral", experts=2, topk=2), "expert dispatch: alltoall"),
        (Case(loss="dpo+sft"), "loss: DPO"),
        (Case(pp=2, first=1), "uneven stages"),
    ],
)
def test_features_of_a_case(case: Case, feature: str) -> None:
    assert feature in features(case)
    assert feature not in features(Case())


def test_refusals_say_why(shelf: ModelShelf) -> None:
    too_narrow, odd_pairs, no_room = (
        Case(width=3),
        Case(loss="dpo"),
        Case(batching="packed", dp=2, length=9, mbs=2, loss="dpo"),
    )
    for case, word in (
        (too_narrow, "width"),
        (odd_pairs, "mbs"),
        (no_room, "batching"),
        (Case(backend="fsdp1", pp=2), "pp"),
    ):
        refused = refusal(case, shelf)
        assert refused is not None and word in str(refused), case


@pytest.mark.parametrize("loss", ["nll", "rm", "value"])
@pytest.mark.parametrize(
    ("family", "rope", "runs"),
    [("kimi_k2", "llama3", False), ("deepseek_v2", "linear", False), ("kimi_k2", "yarn", True)],
)
def test_what_latent_attention_cannot_be_is_not_drawn_for_a_model_of_scores_either(
    family: str, rope: str, runs: bool, loss: str, shelf: ModelShelf
) -> None:
    case = Case(
        family=family, rope=rope, loss=loss, kv=2, group=3, width=9, experts=4, topk=2, expert=8, mbs=2
    )
    refused = refusal(case, shelf)
    said = "" if refused is None else str(refused)
    assert ("latent attention has the plain rotary embedding" in said) is not runs


def test_shelf_makes_a_model_once_and_whole(tmp_path: Path) -> None:
    shelf = ModelShelf(tmp_path)
    case = Case(layers=2, tied=True)
    directory = shelf.described(case)
    assert (directory / "config.json").is_file() and not (directory / "model.safetensors").exists()
    assert shelf.complete(case) == directory and (directory / "model.safetensors").is_file()
    written = (directory / "model.safetensors").stat().st_mtime_ns
    assert (
        shelf.complete(case) == directory and (directory / "model.safetensors").stat().st_mtime_ns == written
    )
    assert shelf.described(Case(layers=2)) != directory


def test_a_family_that_transformers_knows_by_another_name_is_published_so(tmp_path: Path) -> None:
    case = Case(family="kimi_k2", layers=2, kv=2, experts=4, topk=2, expert=6)
    directory = ModelShelf(tmp_path).complete(case)
    content = json.loads((directory / "config.json").read_text())
    assert content["model_type"] == "kimi_k2" and set(content["auto_map"]) == {
        "AutoConfig",
        "AutoModelForCausalLM",
    }
    assert type(load_model(directory)).__name__ == "DeepseekV3ForCausalLM"
