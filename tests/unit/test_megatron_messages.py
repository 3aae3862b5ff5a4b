"""What Megatron-Core says to who builds on it is not shown to users; everything else of its loggers is."""

from __future__ import annotations

import importlib
import logging

import pytest

from megarl.models import megatron
from tests.tiers import newest_megatron

pytestmark = newest_megatron


@pytest.mark.parametrize(("name", "beginning"), megatron._TO_DEVELOPERS.items())
def test_messages_to_developers_are_hidden_and_no_others(
    caplog: pytest.LogCaptureFixture, name: str, beginning: str
) -> None:
    module = importlib.import_module(name)
    # releases that say nothing there have no logger
    assert not hasattr(module, "logger") or module.logger.name == name, (
        "the logger that gives the message has another name"
    )
    logging.getLogger(name).warning("%s of this release", beginning)
    logging.getLogger(name).warning("the loss is lost")
    assert [record.getMessage() for record in caplog.records] == ["the loss is lost"]
