"""How hypothesis tries the unit tests (as long as a slow machine takes, and a failure says how to repeat it),
and what whole runs of a driver begin from."""

from __future__ import annotations

import json

import hypothesis
import pytest

from tests.unit.tiny_model import make_tiny_model

hypothesis.settings.register_profile("megarl", deadline=None, print_blob=True)
hypothesis.settings.load_profile("megarl")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A directory with an untrained model."""
    return make_tiny_model(tmp_path_factory.mktemp("model"), 5)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A file of sums. Seven records and batches of four: steps run over the ends of epochs."""
    path = tmp_path_factory.mktemp("data") / "sums.jsonl"
    path.write_text(
        "\n".join(json.dumps({"prompt": f"{left}+{left}=", "answer": str(2 * left)}) for left in range(7))
    )
    return str(path)
