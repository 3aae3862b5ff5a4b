"""``megarl convert selftest`` with a Megatron-Core worker: it passes what is right, and finds what no round
trip can."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from converters.families import family_of
from converters.selftest import Finding, selftest
from converters.selftest_models import tiny_config
from megarl.parity.converted import logprobs_by
from megarl.parity.pool import WorkerPool
from tests.tiers import sampled, slow
from tests.unit.test_family_files import GRANITE, NO_MULTIPLIERS, forget_families, load_family_file, written  # noqa: F401

# each rule hands its tensors on in another order, so that export undoes what import did
SWAPPED = """
def swapped(*of):
    for rule in llama.FAMILY.layer_rules(*of):
        is_gated = rule.megatron_name.endswith("mlp.linear_fc1.weight")
        yield replace(rule, parts=rule.parts[::-1]) if is_gated else rule

FAMILY = replace(FAMILY, layer_rules=lambda *of: tuple(swapped(*of)))
"""


def results(pool: WorkerPool, file: Path, wanted: set[str]) -> dict[tuple[str, str], str]:
    """Of the first variants, until those that are wanted have come."""
    family = load_family_file(file)
    config: dict[str, Any] = {**tiny_config(family), **NO_MULTIPLIERS}
    return first(selftest(family, config, logprobs_by(pool, [file])), wanted)


def first(findings: Iterator[Finding], wanted: set[str]) -> dict[tuple[str, str], str]:
    found: dict[tuple[str, str], str] = {}
    for finding in findings:
        found[finding.check, finding.variant] = finding.result
        if finding.check == "log-probabilities":
            wanted = wanted - {finding.variant}
        if not wanted:
            break
    return found


@sampled(2)
@pytest.mark.parametrize("name", ["kimi_k2", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"])
def test_a_family_that_is_made_otherwise(pool: WorkerPool, name: str) -> None:
    """Known to transformers by another name, or with a recurrence and an MTP layer that it does not make."""
    family = family_of(name)
    found = first(selftest(family, tiny_config(family), logprobs_by(pool, [])), {"as it is"})
    assert found["log-probabilities", "as it is"] == found["tensors", "as it is"] == "passed"


@slow
def test_a_family_of_a_user(pool: WorkerPool, tmp_path: Path) -> None:
    found = results(
        pool, written(tmp_path, GRANITE), {"as it is", "tie_word_embeddings = true", "mlp_bias = true"}
    )
    assert "failed" not in found.values()
    assert (
        found["log-probabilities", "as it is"]
        == found["log-probabilities", "tie_word_embeddings = true"]
        == "passed"
    )
    # Megatron-Core has biases everywhere, nowhere, or on queries, keys and values alone
    assert found["log-probabilities", "mlp_bias = true"] == "left out"


def test_gate_and_up_exchanged(pool: WorkerPool, tmp_path: Path) -> None:
    found = results(pool, written(tmp_path, GRANITE + SWAPPED), {"as it is"})
    assert {check for (check, _), result in found.items() if result == "failed"} == {"log-probabilities"}
    assert found["round trip", "as it is"] == "passed"


@slow
def test_a_family_that_is_built_in(pool: WorkerPool) -> None:
    family = family_of("qwen3_moe")
    config = {**tiny_config(family), "mlp_only_layers": [1]}
    found = first(selftest(family, config, logprobs_by(pool, [])), {"as it is"})
    assert set(found.values()) == {"passed"} and ("log-probabilities", "as it is") in found
