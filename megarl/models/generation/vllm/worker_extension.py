"""Extension of vLLM's worker class (``worker_extension_cls``): a base class with additional methods."""

from __future__ import annotations

import gc
import traceback
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from megarl.distributed.device import seed_everything
from megarl.errors import MegarlError
from megarl.models.generation.vllm.shared_memory_names import remove_names

if TYPE_CHECKING:
    from megarl.weight_sync.mailbox import MailboxHandle


class Failure(NamedTuple):
    """The error of a rank whose call failed.

    Attributes:
        message: message of the error, preceded by its type unless it is megarl's own error.
        on_purpose: True if it is megarl's own error: the rank can still be used, but has no complete weights.
        trace: the stack trace.
    """

    message: str
    on_purpose: bool
    trace: str


class WorkerCalls:
    """Additional methods of a vLLM worker."""

    weight_transfer_engine: Any

    def megarl_call(self, method: str, arguments: Mapping[str, object]) -> tuple[str, bool, str] | None:
        """Call a weight-transfer method of vLLM. Return None, or the fields of a ``Failure`` if it raises.

        If several ranks raised, vLLM would read only the first failed rank's response. The other responses
        would stay in their queues, and each later call would read the response to the call before it.
        """
        try:
            getattr(self, method)(**arguments)
            return None
        except Exception as error:
            on_purpose = isinstance(error, MegarlError)
            # Return plain values, because exceptions of vLLM may not be picklable.
            failure = (
                str(error) if on_purpose else f"{type(error).__name__}: {error}",
                on_purpose,
                traceback.format_exc(),
            )
        # The error's frames refer to weights, and some frames refer to the error. Only the garbage collector
        # frees such cycles.
        gc.collect()
        return failure

    def megarl_meet(self, mailboxes: Mapping[str, MailboxHandle], session: int) -> None:
        """Open the mailbox of the policy rank on this rank's device; see ``RolloutEngine.meet``."""
        self.weight_transfer_engine.meet(mailboxes, session)

    def megarl_slices_read(self) -> tuple[str, dict[str, list[int]]]:
        """Return the id of this rank's device, and the slices of the weights that this rank reads."""
        found: tuple[str, dict[str, list[int]]] = self.weight_transfer_engine.slices_read()
        return found

    def megarl_take_slices(self, names: list[str]) -> None:
        """Expect the weights ``names`` as slices in later refits."""
        self.weight_transfer_engine.take_slices(names)

    def megarl_refuse(self, ticket: int) -> None:
        """Tell the policy rank that this rank does not take part in a refit, so that it does not wait."""
        self.weight_transfer_engine.refuse(ticket)

    def megarl_bind_adapter(self) -> None:
        """Use the adapter of the last refit from now on."""
        self.weight_transfer_engine.bind_adapter()

    def megarl_weights_version(self) -> int | None:
        """Return the version of this rank's weights; None unless they are complete."""
        version: int | None = self.weight_transfer_engine.version()
        return version

    def megarl_seed(self, seed: int) -> None:
        """Seed this rank's random generators. All ranks of an engine must get the same seed, because each
        rank samples the tokens itself."""
        seed_everything(seed)

    def megarl_remove_names(self) -> None:
        """Unlink the files of the memory that this rank shares with other ranks. All of them must have opened
        it."""
        remove_names()
