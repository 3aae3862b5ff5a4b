"""What vLLM's workers answer beside their own methods; vLLM makes it a base of its worker class (``worker_extension_cls``)."""

from __future__ import annotations

from typing import Any


class WeightsVersion:
    """Base of a worker of vLLM."""

    weight_transfer_engine: Any

    def megarl_weights_version(self) -> int | None:
        """Of the weights that this rank has whole; None where it has none."""
        version: int | None = self.weight_transfer_engine.version()
        return version
