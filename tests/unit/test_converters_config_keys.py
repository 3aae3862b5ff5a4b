"""Whatever the config class of a family declares is read or refused."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
from transformers import PreTrainedConfig

from converters.errors import ConversionError
from converters.families.read import read_architecture
from tests.tables import read_table
from tests.tiers import newest_megatron
from tests.unit.converters_tiny import tiny_config

pytestmark = newest_megatron
CHANGED: dict[type, Any] = {
    bool: lambda value: not value,
    int: lambda value: value + 2,
    float: lambda value: 2 * value + 0.5,
}
TABLE = read_table("unread_keys.yaml")


@pytest.mark.parametrize("name", TABLE["families"])
def test_no_key_of_a_family_goes_unread(name: str) -> None:
    """A key that changes changes the architecture, or is refused, or is in the table."""
    base, of_family = tiny_config(name), TABLE["families"][name]
    own = {field.name for field in dataclasses.fields(base)} - {
        field.name for field in dataclasses.fields(PreTrainedConfig)
    }
    assert len(own) > 15
    known = TABLE["changes"] | of_family.get("changes", {})
    for key in sorted(own - {*TABLE["inert"], *of_family.get("inert", [])}):
        changes = known.get(key) or {key: CHANGED[type(getattr(base, key))](getattr(base, key))}
        try:
            # transformers writes into the dictionaries that it is given
            assert read_architecture(tiny_config(name, **copy.deepcopy(changes))) != read_architecture(
                base
            ), key
        except ConversionError as refusal:
            assert key in {*TABLE["refused"], *of_family.get("refused", [])}, refusal
