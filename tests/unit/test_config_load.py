"""Reading configuration files: inheritance, overrides, interpolation, and what is said about broken files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import DictConfig, OmegaConf

from megarl.config import OverridesError, load_config, load_config_with_inheritance, parse_hydra_overrides
from megarl.errors import ConfigError
from tests.tables import read_table

TABLES = read_table("config_load.yaml")


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def test_later_parents_win_and_the_file_wins_over_all(tmp_path: Path) -> None:
    write(tmp_path, "deep/root.yaml", "a: root\nb: root\nc: root\nd: root\nlist: [1, 2, 3]\n")
    write(tmp_path, "first.yaml", "defaults: deep/root.yaml\nb: first\nc: first\nd: first\n")
    write(tmp_path, "second.yaml", "c: second\nd: second\nlist: [9]\n")
    main = write(tmp_path, "main.yaml", "defaults: [first.yaml, second.yaml]\nd: main\n")
    assert load_config(main) == {"a": "root", "b": "first", "c": "second", "d": "main", "list": [9]}


@pytest.mark.parametrize(
    ("overrides", "train"),
    [
        (["data.train.path=mine.jsonl"], {"path": "mine.jsonl"}),
        (["data.train.weight=2", "data.train.path=mine.jsonl"], {"weight": 2, "path": "mine.jsonl"}),
        (["data.train.name=owner/set"], {"name": "owner/set"}),
        (["data.train.0.path=mine.jsonl"], [{"path": "mine.jsonl"}, {"path": "b.jsonl"}]),
    ],
)
def test_a_place_on_the_command_line_takes_that_of_an_inherited_list(
    tmp_path: Path, overrides: list[str], train: Any
) -> None:
    main = write(
        tmp_path,
        "main.yaml",
        "data: {train: [{name: gsm8k, prompt_key: p}, {path: b.jsonl}], validation: null}\n",
    )
    assert load_config(main, overrides)["data"] == {"train": train, "validation": None}


def test_sections_merge_key_by_key_and_null_replaces_a_section(tmp_path: Path) -> None:
    write(tmp_path, "base.yaml", "kept: {x: 1, y: 2}\ngone: {x: 1}\n")
    main = write(tmp_path, "main.yaml", "defaults: base.yaml\nkept: {y: 3}\ngone: null\n")
    assert load_config(main) == {"kept": {"x": 1, "y": 3}, "gone": None}


FIELDS = "prompt_key: problem, answer_key: solution"
RECIPE = (
    f"data: {{train: {{name: gsm8k, split: test, {FIELDS}, extra_keys: [level], weight: 2}}, "
    "validation: null, shuffle: true}\n"
)
MINE = {"path": "mine.jsonl", "weight": 2}


@pytest.mark.parametrize(
    ("overrides", "train"),
    TABLES["a source on the command line replaces the inherited form"],
)
def test_a_source_on_the_command_line_replaces_the_inherited_form(
    tmp_path: Path, overrides: list[str], train: Any
) -> None:
    found = load_config(write(tmp_path, "recipe.yaml", RECIPE), overrides)["data"]
    if (
        isinstance(found["train"], dict)
        and "path" not in found["train"]
        and found["train"]["name"] == "gsm8k"
    ):
        assert found["train"].pop("extra_keys") == ["level"]
    assert found["train"] == train and found["shuffle"]


def test_a_source_in_a_list_is_replaced_by_its_place(tmp_path: Path) -> None:
    recipe = write(
        tmp_path,
        "recipe.yaml",
        f"data: {{train: [{{path: a, {FIELDS}}}, {{path: b, {FIELDS}, repeat: 2}}]}}\n",
    )
    found = load_config(recipe, ["data.train.1.path=c", "data.train.0.messages_key=m"])["data"]["train"]
    assert found == [{"path": "a", "messages_key": "m"}, {"path": "c", "repeat": 2}]


@pytest.mark.parametrize("layered", [False, True])
def test_a_source_in_a_file_replaces_the_inherited_form(tmp_path: Path, layered: bool) -> None:
    write(tmp_path, "recipe.yaml", RECIPE)
    mine = write(
        tmp_path,
        "mine.yaml",
        ("" if layered else "defaults: recipe.yaml\n") + "data: {train: {path: mine.jsonl}}\n",
    )
    found = load_config(tmp_path / "recipe.yaml", layers=[mine]) if layered else load_config(mine)
    assert found["data"]["train"] == MINE
    moved = write(tmp_path, "more.yaml", "data: {train: {prompt_key: p}}\n")
    assert load_config(mine if not layered else tmp_path / "recipe.yaml", layers=[mine, moved])["data"][
        "train"
    ] == {
        **MINE,
        "prompt_key": "p",
    }


def test_defaults_are_relative_to_their_own_file_or_absolute(tmp_path: Path) -> None:
    far = write(tmp_path, "elsewhere/far.yaml", "defaults: ../near.yaml\nfar: 1\n")
    write(tmp_path, "near.yaml", "near: 2\n")
    main = write(tmp_path, "deep/er/main.yaml", f"defaults: {far}\n")
    assert load_config(main) == {"near": 2, "far": 1}


def test_base_dir_moves_the_start_of_the_file_s_own_defaults_only(tmp_path: Path) -> None:
    write(tmp_path, "other/base.yaml", "defaults: leaf.yaml\nx: 1\n")
    write(tmp_path, "other/leaf.yaml", "y: 2\n")
    main = write(tmp_path, "main.yaml", "defaults: base.yaml\n")
    assert OmegaConf.to_container(load_config_with_inheritance(main, tmp_path / "other")) == {"x": 1, "y": 2}


def test_a_diamond_is_no_circle(tmp_path: Path) -> None:
    write(tmp_path, "root.yaml", "x: 1\n")
    for side in ("left", "right"):
        write(tmp_path, f"{side}.yaml", f"defaults: root.yaml\n{side}: true\n")
    main = write(tmp_path, "main.yaml", "defaults: [left.yaml, right.yaml]\n")
    assert load_config(main) == {"x": 1, "left": True, "right": True}


def test_a_circle_is_shown_in_order(tmp_path: Path) -> None:
    for name, parent in (("a", "b"), ("b", "c"), ("c", "a")):
        write(tmp_path, f"{name}.yaml", f"defaults: {parent}.yaml\nx: 1\n")
    with pytest.raises(ConfigError, match=r"circle: .*a\.yaml -> .*b\.yaml -> .*c\.yaml -> .*a\.yaml"):
        load_config(tmp_path / "a.yaml")


def test_interpolation_crosses_files_and_sees_overrides(tmp_path: Path) -> None:
    write(
        tmp_path,
        "base.yaml",
        "model: {name: m, copies: '${size}'}\ntokens: ${mul:${size},${length}}\nlength: 7\n",
    )
    main = write(tmp_path, "main.yaml", "defaults: base.yaml\nsize: 2\nname: ${model.name}\n")
    expected = {"model": {"name": "m", "copies": 3}, "tokens": 21, "length": 7, "size": 3, "name": "m"}
    assert load_config(main, ["size=3"]) == expected
    assert type(load_config(main)["model"]) is dict


def test_numbers_in_scientific_notation_are_numbers(tmp_path: Path) -> None:
    main = write(tmp_path, "main.yaml", "lr: 5e-6\n")
    assert load_config(main) == {"lr": 5e-6}
    assert load_config(main, ["lr=1e-3"]) == {"lr": 1e-3}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        ("  \n\n", "is empty"),
        ("# nothing but a comment\n", "holds no keys"),
        ("- a\n- b\n", "holds no keys"),
        ("a: 1\nb: [1, 2\nc: 3\n", r"line 3.*not valid YAML"),
        ("a: 1\nb: 2\na: 3\n", r"line 3.*not valid YAML.*duplicate key"),
        ("a: ${nowhere.b}\n", r"a cannot be interpolated.*nowhere"),
        ("a: ${mul:2}\n", "a cannot be interpolated"),
        ("a: ???\n", "give the key a value"),
        ("a:\n\tb: 1\n", "line 2.*not valid YAML.*Fix: indent by spaces, not by tabs"),
        ("default: base\n", "there is no key default. Fix: write defaults: base"),
        ("defaults: [_self_]\na: 1\n", "Fix: remove _self_"),
        ("defaults: 3\n", "defaults holds"),
        ("defaults: [3]\na: 1\n", "defaults holds 3"),
        ("defaults: missing.yaml\n", r"missing\.yaml does not exist, named in the defaults of .*main\.yaml"),
    ],
)
def test_broken_files_say_where_and_what(tmp_path: Path, text: str, message: str) -> None:
    main = write(tmp_path, "main.yaml", text)
    with pytest.raises(ConfigError, match=message) as caught:
        load_config(main)
    assert "Fix: " in str(caught.value)
    assert "main.yaml" in str(caught.value)


def test_missing_file_and_directory(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        load_config(tmp_path / "none.yaml")
    with pytest.raises(ConfigError, match=r"is a directory\. Fix: give the path"):
        load_config(tmp_path)
    write(tmp_path, "config.json", "{}")
    with pytest.raises(ConfigError, match=f"Fix: name a recipe, and add policy.model_name={tmp_path}$"):
        load_config(tmp_path)
    write(tmp_path, "config.yaml", "a: 1")
    with pytest.raises(ConfigError, match=f"Fix: write {tmp_path}/config.yaml$"):
        load_config(tmp_path)


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    (tmp_path / "main.yaml").write_bytes(b"\xff\xfe\x00a: 1")
    with pytest.raises(ConfigError, match=r"main\.yaml"):
        load_config(tmp_path / "main.yaml")


START: dict[str, Any] = {
    "a": {"b": 1, "c": {"d": 2}},
    "list": [{"x": 1}, {"x": 2}],
    "t": "text",
    "link": "${a.b}",
}


def overridden(*overrides: str) -> Any:
    return OmegaConf.to_container(parse_hydra_overrides(OmegaConf.create(START), overrides), resolve=True)


def test_no_override_changes_nothing_and_the_original_stays() -> None:
    config = OmegaConf.create(START)
    assert parse_hydra_overrides(config, []) == config
    parse_hydra_overrides(config, ["a.b=5", "~t"])
    assert OmegaConf.to_container(config) == START


@pytest.mark.parametrize(
    ("override", "path", "value"),
    TABLES["override sets"],
)
def test_override_sets(override: str, path: tuple[str | int, ...], value: object) -> None:
    found = overridden(override)
    for part in path:
        found = found[part]
    assert found == value and type(found) is type(value)


def test_overrides_apply_in_order_and_remove() -> None:
    assert overridden("a.b=1", "a.b=2")["a"]["b"] == 2
    assert "c" not in overridden("~a.c")["a"]
    assert "c" not in overridden("~a.c.d", "~a.c")["a"]
    assert "t" not in overridden("~t=text")
    assert overridden("~t", "+t=again")["t"] == "again"


@pytest.mark.parametrize("pattern", ["*policy*", "*policy*,*vllm*", "@x", "%x", "`x`"])
def test_a_text_that_begins_with_a_mark_of_yaml_needs_no_quotes(pattern: str) -> None:
    assert overridden(f"t={pattern}")["t"] == pattern


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("a.b", "has no '='"),
        ("my-data.yaml", r"has no '='\. Fix: write --with my-data\.yaml$"),
        (__file__, r"Fix: write --with /"),
        ("base/dtensor", r"Fix: write --with base/dtensor to merge it over CONFIG, or leave it out$"),
        ("a.b:1e-6", r"Fix: write a\.b=1e-6$"),
        ("~lists", r"Fix: leave it out, or write ~list$"),
        ("=3", "names no key"),
        ("", "names no key"),
        ("a..b=3", "names no key"),
        (".a=3", "names no key"),
        ("+a.b=3", "there already"),
        ("~a.none", "not there"),
        ("~none.b", "not there"),
        ("~t=other", "the value of t is 'text'"),
        ("t.x=3", "t is the value 'text', not a section"),
        ("a.b=[1", "cannot be applied: .*Fix: close its brackets and quotes, and quote the whole word"),
        ("list.7.x=3", "cannot be applied"),
    ],
)
def test_bad_overrides_are_named(override: str, message: str) -> None:
    with pytest.raises(OverridesError, match=message) as caught:
        overridden(override)
    assert repr(override) in str(caught.value)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("words", [("a.b", "=", "3"), ("a.b=", "3"), ("a.b", "=3")])
def test_spaces_around_the_equals_sign_are_named(words: tuple[str, ...]) -> None:
    with pytest.raises(OverridesError, match="has spaces around its '='"):
        overridden(*words)


def test_a_removal_may_follow_an_empty_value() -> None:
    changed = overridden("name=", "~a.c")
    assert changed["name"] is None and "c" not in changed["a"]


def test_a_data_file_among_overrides_is_the_training_data(tmp_path: Path) -> None:
    path = write(tmp_path, "mine.jsonl", "{}")
    with pytest.raises(OverridesError, match=rf"Fix: write data\.train\.path={path}$"):
        overridden(str(path))


KEYS = st.text("abcd_", min_size=1, max_size=3)
TREES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-99, 99)
    | st.text("xyz ", max_size=4)
    | st.lists(st.integers(0, 9), max_size=3),
    lambda inner: st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=8,
)


def merged_by_hand(lower: Any, upper: Any) -> Any:
    """The slow reference: dictionaries merge key by key, everything else is replaced."""
    if not (isinstance(lower, dict) and isinstance(upper, dict)):
        return upper
    result = dict(lower)
    for key, value in upper.items():
        result[key] = merged_by_hand(lower[key], value) if key in lower else value
    return result


@settings(max_examples=60, derandomize=True)
@given(trees=st.lists(st.dictionaries(KEYS, TREES, min_size=1, max_size=4), min_size=1, max_size=4))
def test_inheritance_is_a_merge_in_order(
    trees: list[dict[str, Any]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("configs")
    for number, tree in enumerate(trees):
        OmegaConf.save(OmegaConf.create(tree), folder / f"{number}.yaml")
    expected: Any = {}
    for tree in trees:
        expected = merged_by_hand(expected, tree)
    main = write(
        folder, "main.yaml", f"defaults: {[f'{number}.yaml' for number in range(len(trees))]}\nown: 1\n"
    )
    assert load_config(main) == {**expected, "own": 1}


def test_types_returned(tmp_path: Path) -> None:
    main = write(tmp_path, "main.yaml", "a: {b: [1]}\n")
    assert isinstance(load_config_with_inheritance(main), DictConfig)
    assert type(load_config(str(main))["a"]["b"]) is list
