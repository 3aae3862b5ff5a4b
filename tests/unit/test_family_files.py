"""A user's own model family: its file, the self-test that is generated from it, and conversions with it."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from converters import families, family_file, importing
from converters.checkpoint.manifest import RULES
from converters.checkpoint.source import open_source
from converters.command import main
from converters.errors import ConversionError
from converters.families import family_of
from converters.families.read import read_architecture
from converters.family_file import load_family_file
from converters.importing import import_model, plan_import
from converters.mapping.rules import forget_rules
from converters.selftest import Finding, selftest, selftest_of
from converters.selftest_models import save_random, tiny_config
from tests.tiers import slow

# the example that users are shown
EXAMPLE = textwrap.dedent((family_file.__doc__ or "").partition("::\n\n")[2].partition("\n``megarl")[0])
# Granite is known to transformers and is Llama where its multipliers change nothing
GRANITE = """
from dataclasses import replace
from converters.families import llama

MULTIPLIERS = {"attention_multiplier", "embedding_multiplier", "logits_scaling", "residual_multiplier"}
FAMILY = replace(
    llama.FAMILY,
    model_type="granite",
    architecture_class="GraniteForCausalLM",
    config_keys=llama.FAMILY.config_keys | MULTIPLIERS,
)
"""
NO_MULTIPLIERS = {"attention_multiplier": 12**-0.5}
"""Heads of the tiny model are 12 wide; the other multipliers are 1 by themselves."""


@pytest.fixture(autouse=True)
def forget_families(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Families that a test registers are unknown to the next."""
    before = dict(families._known)
    yield
    families._known.clear()
    families._known.update(before)
    forget_rules()


def written(directory: Path, text: str) -> Path:
    path = directory / "a_family.py"
    path.write_text(text, encoding="utf-8")
    return path


def facts(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, dict[str, Any]]:
    capsys.readouterr()
    code = main([*argv, "--json"])
    return code, json.loads(capsys.readouterr().out)


def failed(findings: list[Finding]) -> dict[str, str]:
    return {finding.check: finding.text for finding in findings if finding.result == "failed"}


def test_the_example_of_the_documentation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = str(written(tmp_path, EXAMPLE))
    code, found = facts(capsys, "selftest", "--family-file", file)
    assert code == 0 and found["passed"] and found["family"] == "my_family"
    checks = {finding["check"] for finding in found["findings"] if finding["result"] == "passed"}
    assert checks == {"rules", "tensors", "shards", "round trip", "accounting"}
    left_out = {
        finding["check"]: finding["text"] for finding in found["findings"] if finding["result"] == "left out"
    }
    assert (
        left_out["log-probabilities"]
        == "no Megatron-Core worker at hand: run this as megarl convert selftest"
    )
    # of Qwen2, whose layer_types alone decide
    assert (
        left_out.keys() == {"log-probabilities", "config keys"}
        and "no code reads max_window_layers" in left_out["config keys"]
    )
    family = family_of("my_family")
    config = tiny_config(family)
    save_random(tmp_path / "hf", config, family, read_architecture(config))
    hf, mcore, back = (str(tmp_path / name) for name in ("hf", "mcore", "back"))
    families._known.pop("my_family")
    assert main(["import", hf, mcore]) == 2
    assert "model_type = 'my_family' has no mapping rules" in capsys.readouterr().err
    for argv in (
        ["import", hf, mcore],
        ["export", mcore, back],
        ["verify", hf, back],
        ["inspect", mcore],
        ["plan", hf],
        ["diff", hf, mcore],
    ):
        families._known.pop("my_family", None)
        assert main([*argv, "--family-file", file]) == 0, argv
    assert "model.layers.2.ffn.up_proj.weight" in (Path(back) / "conversion.json").read_text()
    assert "my_family" in {
        family["model_type"] for family in facts(capsys, "families", "--family-file", file)[1]["families"]
    }


def test_unfinished_work_of_other_rules_is_not_taken_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Names and shapes are the same whichever of gate and up comes first."""
    family = load_family_file(written(tmp_path, EXAMPLE))
    config = tiny_config(family)
    save_random(tmp_path / "hf", config, family, read_architecture(config))
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(importing, "finish_checkpoint", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        import_model(plan_import(open_source(tmp_path / "hf")), tmp_path / "mcore")
    turned = (
        "tuple(replace(rule, parts=rule.parts[::-1]) if rule.kind == 'gated' else rule for rule in "
        "layer_rules(architecture, layer))"
    )
    mended = f"FAMILY = replace(FAMILY, layer_rules=lambda architecture, layer: {turned})\n"
    load_family_file(written(tmp_path, EXAMPLE + mended))
    outcome = import_model(plan_import(open_source(tmp_path / "hf")), tmp_path / "mcore")
    assert outcome.resumed == 0 and outcome.notes["started_anew_because_of"] == [RULES]


@slow
def test_a_family_that_transformers_knows(tmp_path: Path) -> None:
    file = written(tmp_path, GRANITE)
    family = load_family_file(file)
    (tmp_path / "config.json").write_text(
        json.dumps({**tiny_config(family), **NO_MULTIPLIERS, "tie_word_embeddings": True})
    )
    code, found, text = selftest_of(
        "granite", [], tmp_path, lambda files: nullcontext(lambda model, tokens: torch.zeros(tokens.shape))
    )
    assert code == 1 and not found["passed"] and "bound 1e-05" in text
    assert {each["check"] for each in found["findings"] if each["result"] == "failed"} == {
        "log-probabilities"
    }
    varied = {each["variant"] for each in found["findings"] if each["check"] == "rules"}
    assert varied >= {"as it is", "mlp_bias = true", "attention_bias = true", "tie_word_embeddings = false"}


WRONG = {
    "a tensor of two parameters": (
        "rules",
        "has 2 rules",
        'name=part.name.replace("k_proj.weight", "q_proj.weight")',
    ),
    "a tensor that is not there": (
        "tensors",
        "missing: model.layers.0.mlp.gates_proj.weight",
        'name=part.name.replace("gate_", "gates_")',
    ),
    "a wrong shape": (
        "tensors",
        "shape: model.norm.weight is [42]",
        'shape=part.shape[:-1] + (part.shape[-1] + 1,) if "model.norm" in part.name else part.shape',
    ),
}


@pytest.mark.parametrize("fault", WRONG)
def test_wrong_rules_are_found(fault: str, tmp_path: Path) -> None:
    check, said, change = WRONG[fault]
    wrong = f"""
def altered(rules):
    return tuple(replace(rule, parts=tuple(replace(part, {change}) for part in rule.parts)) for rule in rules)

FAMILY = replace(
    FAMILY,
    model_rules=lambda architecture: altered(llama.FAMILY.model_rules(architecture)),
    layer_rules=lambda architecture, layer: altered(llama.FAMILY.layer_rules(architecture, layer)),
)
"""
    family = load_family_file(written(tmp_path, GRANITE + wrong))
    found = failed(list(selftest(family, {**tiny_config(family), **NO_MULTIPLIERS})))
    assert set(found) == {check} and said in found[check], found


def test_a_layer_without_a_rule_and_a_rule_of_the_wrong_kind(tmp_path: Path) -> None:
    without = (
        GRANITE + "FAMILY = replace(FAMILY, layer_rules=lambda *of: llama.FAMILY.layer_rules(*of)[:-1])\n"
    )
    family = load_family_file(written(tmp_path, without))
    found = failed(list(selftest(family, {**tiny_config(family), **NO_MULTIPLIERS})))
    assert set(found) == {"tensors"} and "unknown: model.layers.2.mlp.down_proj.weight" in found["tensors"]
    row = "replace(rule, kind=Kind.ROW) if rule.kind is Kind.QKV else rule"
    wrong = f"""
from converters.mapping.rule import Kind
FAMILY = replace(FAMILY, layer_rules=lambda *of: tuple({row} for rule in llama.FAMILY.layer_rules(*of)))
"""
    family = load_family_file(written(tmp_path, GRANITE + wrong))
    found = failed(list(selftest(family, {**tiny_config(family), **NO_MULTIPLIERS})))
    assert set(found) == {"rules"} and "row is made of 1 tensors, not of 3" in found["rules"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("FAMILY = 5", "defines FAMILY = 5"),
        ("", "defines FAMILY = None"),
        ("raise RuntimeError('on purpose')", "fails: RuntimeError: on purpose"),
        ("def (", "cannot be read as a Python file"),
        ("from converters.families.llama import FAMILY", "'llama' is a family that is built in"),
    ],
)
def test_files_that_are_refused(
    text: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["families", "--family-file", str(written(tmp_path, text))]) == 2
    error = capsys.readouterr().err
    assert said in error and "Fix:" in error and "Traceback" not in error


def test_arguments_of_the_selftest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["selftest"]) == 2 and "needs a family" in capsys.readouterr().err
    assert (
        main(["families", "--family-file", str(tmp_path / "no.py")]) == 2
        and "cannot be read" in capsys.readouterr().err
    )
    assert main(["selftest", "--family", "no_such"]) == 2 and "no mapping rules" in capsys.readouterr().err
    assert (
        main(["selftest", "--family", "llama", "--config", str(tmp_path / "no.json")]) == 2
        and "cannot be read" in capsys.readouterr().err
    )
    alone = EXAMPLE.replace('config_like="qwen2",', "")
    assert main(["selftest", "--family-file", str(written(tmp_path, alone))]) == 2
    assert "pass --config FILE" in capsys.readouterr().err


def test_nothing_in_a_checkpoint_runs_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    family = load_family_file(written(tmp_path, EXAMPLE))
    config = tiny_config(family)
    save_random(tmp_path / "hf", config, family, read_architecture(config))
    families._known.pop("my_family")
    exploded = tmp_path / "exploded"
    (tmp_path / "hf" / "a_family.py").write_text(
        f"import pathlib\npathlib.Path({str(exploded)!r}).touch()\n{EXAMPLE}"
    )
    named = {**config, "family_file": "a_family.py", "auto_map": {"AutoConfig": "a_family.Config"}}
    (tmp_path / "hf" / "config.json").write_text(json.dumps(named))
    assert main(["import", str(tmp_path / "hf"), str(tmp_path / "mcore")]) == 2
    assert "no mapping rules" in capsys.readouterr().err and not exploded.exists()
    with pytest.raises(ConversionError):
        family_of("my_family")


SMOLLM3 = """
from dataclasses import replace
from converters.families import llama

FAMILY = replace(
    llama.FAMILY,
    model_type="smollm3",
    architecture_class="SmolLM3ForCausalLM",
    config_keys=llama.FAMILY.config_keys
    | {"no_rope_layers", "no_rope_layer_interval", "use_sliding_window"}
    | {"layer_types", "max_window_layers", "sliding_window"},
)
"""


@slow
def test_keys_that_a_family_calls_its_own_and_does_not_read_are_named(tmp_path: Path) -> None:
    """SmolLM3 rotates nothing in every fourth layer, which one of its keys says; the tiny model has such a
    layer."""
    family = load_family_file(written(tmp_path, SMOLLM3))
    config = tiny_config(family)
    assert 0 in config["no_rope_layers"]
    findings = list(selftest(family, config))
    said = next(finding for finding in findings if finding.check == "config keys")
    assert "no code reads no_rope_layer_interval, no_rope_layers" in said.text
