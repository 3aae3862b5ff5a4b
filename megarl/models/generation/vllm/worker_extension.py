"""Extension of vLLM's workers: additional methods in a base class of vLLM's worker class
(``worker_extension_cls``)."""

from __future__ import annotations

import gc
import traceback
from typing import Any, NamedTuple

from megarl.distributed.device import seed_everything
from megarl.errors import MegarlError
from megarl.models.generation.vllm.shared_memory_names import remove_names


class Failure(NamedTuple):
    """The error of a rank that could not complete a call.

    Attributes:
        message: message of the error, with its type unless that is megarl's own.
        on_purpose: True if the error is megarl's own: the rank is still usable, but without complete weights.
        trace: the stack trace, as text.
    """

    message: str
    on_purpose: bool
    trace: str


class WorkerCalls:
    """Base class of a vLLM worker."""

    weight_transfer_engine: Any

    def megarl_call(self, method: str, arguments: dict[str, Any]) -> tuple[str, bool, str] | None:
        """Call one of vLLM's methods for new weights. An error is returned, as the fields of a ``Failure``.

        If ranks raised, vLLM would read only the first failed rank's response. The responses of the other
        ranks would stay in their queues, and each later call would read the response to the call before it.
        """
        try:
            getattr(self, method)(**arguments)
            return None
        except Exception as error:
            on_purpose = isinstance(error, MegarlError)
            # Return plain values, because an exception of vLLM need not be picklable.
            failure = (
                str(error) if on_purpose else f"{type(error).__name__}: {error}",
                on_purpose,
                traceback.format_exc(),
            )
        # Collect garbage, because the error's frames refer to weights, and some of these frames to the error.
        gc.collect()
        return failure

    def megarl_meet(self, mailboxes: dict[str, Any], session: int) -> None:
        """Find the mailbox of the policy's rank on this rank's device; see ``RolloutEngine.meet``."""
        self.weight_transfer_engine.meet(mailboxes, session)

    def megarl_slices_read(self) -> tuple[str, dict[str, list[int]]]:
        """Return the identity of this rank's device, and the slices of the weights that the rank reads."""
        found: tuple[str, dict[str, list[int]]] = self.weight_transfer_engine.slices_read()
        return found

    def megarl_take_slices(self, names: list[str]) -> None:
        """Set the weights that arrive as slices from now on."""
        self.weight_transfer_engine.take_slices(names)

    def megarl_refuse(self, ticket: int) -> None:
        """Refuse a refit, so that the policy's rank does not wait for this one."""
        self.weight_transfer_engine.refuse(ticket)

    def megarl_bind_adapter(self) -> None:
        """Make this rank compute with the adapter that a refit has sent."""
        self.weight_transfer_engine.bind_adapter()

    def megarl_weights_version(self) -> int | None:
        """Return the version of this rank's weights if they are complete, otherwise None."""
        version: int | None = self.weight_transfer_engine.version()
        return version

    def megarl_seed(self, seed: int) -> None:
        """Seed this rank's random numbers. All ranks of an engine get the same seed, so that each samples the
        same tokens by itself."""
        seed_everything(seed)

    def megarl_remove_names(self) -> None:
        """Remove the files of the memory that this rank shares with other ranks, which have opened it
        by now."""
        remove_names()
