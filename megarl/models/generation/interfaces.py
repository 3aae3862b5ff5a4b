"""Interfaces of generation engines: input and output columns, the methods of an engine, and a check of right
padding."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NotRequired, Protocol, TypeAlias

from typing_extensions import TypedDict

from megarl.config.generation import ColocationConfig, GenerationConfig, ResourcesConfig, VllmConfig
from megarl.errors import BatchError, ConfigError, Violation

if TYPE_CHECKING:
    import ray
    import torch

    from megarl.distributed.batched_data_dict import BatchedDataDict
    from megarl.models.generation.stream import RequestStream
    from megarl.weight_sync.mailbox import MailboxHandle
    from megarl.weight_sync.slices import WantedSlices

Sampling: TypeAlias = Mapping[str, Any]
"""Sampling settings: ``temperature``, ``top_p`` and ``top_k``, as in a generation configuration."""

__all__ = [
    "ColocationConfig",
    "GenerationConfig",
    "GenerationDatumSpec",
    "GenerationInterface",
    "GenerationOutputSpec",
    "ResourcesConfig",
    "RolloutEngine",
    "Sampling",
    "SharesDevices",
    "VllmConfig",
    "verify_right_padding",
]

LENGTH_KEYS = (("input_ids", "input_lengths"), ("output_ids", "unpadded_sequence_lengths"))


class GenerationDatumSpec(TypedDict):
    """Input columns of ``generate``.

    Attributes:
        input_ids: int64 [B, S], right-padded prompts.
        input_lengths: int64 [B], prompt lengths without padding.
        stop_strings: for each row, strings that end the response.
        sampling_seeds: int64 [B]; a row's random numbers depend only on its seed.
        max_new_tokens: int64 [B], maximum number of tokens of each response, in addition to the configured
            limits.
    """

    input_ids: torch.Tensor
    input_lengths: torch.Tensor
    stop_strings: NotRequired[list[list[str] | None]]
    sampling_seeds: NotRequired[torch.Tensor]
    max_new_tokens: NotRequired[torch.Tensor]


GENERATION_INPUTS = tuple(GenerationDatumSpec.__annotations__)
"""Names of the input columns of ``generate``."""


class GenerationOutputSpec(TypedDict):
    """Output columns of ``generate``.

    Attributes:
        output_ids: int64 [B, S'], prompt and response, right-padded with the pad token.
        generation_lengths: int64 [B], number of tokens of each response.
        unpadded_sequence_lengths: int64 [B], number of tokens of prompt and response.
        logprobs: float32 [B, S'], log-probabilities of the response tokens; 0 on the prompt and on padding.
            NaN if the engine does not know them: vLLM returns those of greedy tokens before the temperature
            is applied, so they are valid only at temperature 1.
        truncated: bool [B], the response ended at a length limit. Without this column, it did unless its
            last token is a stop token; an engine that ends responses at stop strings must return it.
    """

    output_ids: torch.Tensor
    generation_lengths: torch.Tensor
    unpadded_sequence_lengths: torch.Tensor
    logprobs: torch.Tensor
    truncated: NotRequired[torch.Tensor]


def verify_right_padding(
    data: BatchedDataDict[Any], pad_value: int = 0, raise_error: bool = True
) -> tuple[bool, str | None]:
    """Check that each row has only ``pad_value`` after its last token.

    Args:
        data: contains ``input_ids`` and ``input_lengths``, or ``output_ids`` and
            ``unpadded_sequence_lengths``: int64 [B, S] and [B].
        pad_value: the pad token.
        raise_error: raise for a wrongly padded row instead of returning the message.

    Returns:
        (True, None); or (False, message) for a wrongly padded row if ``raise_error`` is False.

    Raises:
        BatchError: the data has a wrong type, key, shape or length; or, with ``raise_error``, a row is
            wrongly padded.
    """
    token_key, tokens, lengths = _padded_pair(data, pad_value)
    if tokens.shape[1] == 0:
        return True, None
    import torch

    beyond = (
        torch.arange(tokens.shape[1], device=tokens.device)[None, :] >= lengths.to(tokens.device)[:, None]
    )
    wrong = beyond & (tokens != pad_value)
    if not bool(wrong.any()):
        return True, None
    row, column = map(int, wrong.nonzero()[0])
    message = (
        f"{token_key}[{row}, {column}] = {int(tokens[row, column])}: non-padding token after the sequence's "
        f"{int(lengths[row])} tokens; "
        f"only the pad token {pad_value} may stand there. Pad on the right, and with that token"
    )
    if raise_error:
        raise BatchError(message)
    return False, message


def _padded_pair(data: BatchedDataDict[Any], pad_value: int) -> tuple[str, torch.Tensor, torch.Tensor]:
    """Check types and shapes. Return the key of the tokens, the tokens and their lengths."""
    from megarl.distributed.batched_data_dict import BatchedDataDict

    if not isinstance(data, BatchedDataDict):
        raise BatchError(
            f"data must be a BatchedDataDict, got {type(data).__name__}: wrap the dictionary in "
            "BatchedDataDict(...)"
        )
    if pad_value is None:
        raise BatchError(
            "pad_value = None: the pad token's id is needed to tell padding from tokens; give the "
            "tokenizer's pad_token_id"
        )
    for token_key, length_key in LENGTH_KEYS:
        if token_key in data and length_key in data:
            break
    else:
        raise BatchError(
            "data must contain either input_ids and input_lengths, or output_ids and "
            "unpadded_sequence_lengths; "
            f"it contains {sorted(map(str, data.keys()))}"
        )
    tokens, lengths = data[token_key], data[length_key]
    if tokens.ndim != 2:
        raise BatchError(
            f"{token_key} must be 2-D [batch, sequence], got {tokens.ndim}-D of shape {tuple(tokens.shape)}"
        )
    if tuple(lengths.shape) != (tokens.shape[0],):
        raise BatchError(
            f"{length_key} has shape {tuple(lengths.shape)}, expected ({tokens.shape[0]},): one length for "
            f"each row of {token_key}"
        )
    if lengths.numel() and (int(lengths.max()) > tokens.shape[1] or int(lengths.min()) < 0):
        raise BatchError(
            f"{length_key} ranges from {int(lengths.min())} to {int(lengths.max())}: every length must lie "
            "between 0 and "
            f"the width {tokens.shape[1]} of {token_key}"
        )
    return token_key, tokens, lengths


class GenerationInterface(ABC):
    """An engine that generates responses to prompts."""

    @abstractmethod
    def init_collective(self, ip: str, port: int, world_size: int) -> list[ray.ObjectRef[Any]]:
        """Join the process group over which weights arrive, and return futures.

        Args:
            ip, port: rendezvous address.
            world_size: number of ranks of all engines, plus one for the policy.
        """

    @abstractmethod
    def generate(
        self, data: BatchedDataDict[GenerationDatumSpec], greedy: bool, *, sampling: Sampling | None = None
    ) -> BatchedDataDict[GenerationOutputSpec]:
        """Generate a response to every prompt, within the limits and with the stop tokens and strings of
        ``policy.generation``. ``sampling`` and ``stopping`` of this package have what an engine in Python
        needs for it.

        Args:
            data: the prompts.
            greedy: take the most likely token instead of sampling.
            sampling: ``temperature``, ``top_p`` and ``top_k`` that override the configured ones. An engine
                needs this parameter only if validation overrides them.
        """

    def requests(
        self, stop_token_ids: Iterable[int], pad_token_id: int, *, greedy: bool, sampling: Sampling | None
    ) -> RequestStream:
        """Return a stream of requests. Call this when the engine is ready to generate. By default, each
        ``poll`` is one call of ``generate``.

        Args:
            stop_token_ids: tokens that end a completion.
            pad_token_id: token that pads prompts.
            greedy, sampling: see ``generate``.
        """
        from megarl.models.generation.stream import Waves

        return Waves(self, pad_token_id, stop_token_ids, greedy=greedy, sampling=sampling)

    @abstractmethod
    def prepare_for_generation(self, *args: Any, **kwargs: Any) -> bool:
        """Allocate the memory for generation, and return True."""

    @abstractmethod
    def finish_generation(self, *args: Any, **kwargs: Any) -> bool:
        """Free the device memory that other users of the devices need, and return True."""

    def prepare_refit_info(self, state_dict_info: dict[str, Any]) -> None:
        """Store names, shapes and dtypes of the weights that refits will send."""
        raise NotImplementedError

    def update_weights_from_ipc_handles(self, ipc_handles: dict[str, Any]) -> bool:
        """Load weights from IPC handles of device memory. Return False on failure."""
        raise NotImplementedError

    def update_weights(self, ipc_handles: dict[str, Any]) -> bool:
        """Call ``update_weights_from_ipc_handles``, for callers that use this older name."""
        return self.update_weights_from_ipc_handles(ipc_handles)

    def update_weights_from_collective(self) -> list[ray.ObjectRef[Any]]:
        """Receive weights over the process group of ``init_collective``, and return futures."""
        raise NotImplementedError


class SharesDevices(Protocol):
    """A policy that shares its devices with rollout engines."""

    def offload_after_refit(self) -> None:
        """Offload the whole policy from the devices."""

    def prepare_for_lp_inference(self) -> None:
        """Move what computing log-probabilities needs back to the devices."""


class RolloutEngine(GenerationInterface):
    """One or more engines that are separate from the policy and get its weights by refits.

    From ``GenerationInterface``, ``init_collective`` connects engines to a policy on other devices, and
    ``update_weights_from_*`` receive weights. This class adds the remaining methods that a refit needs.
    """

    @property
    @abstractmethod
    def version(self) -> int | None:
        """Version of the weights on all engines; None if versions differ, or if an engine has no weights."""

    @property
    @abstractmethod
    def ranks(self) -> int:
        """Total number of ranks of all engines. Each is a rank of the process group over which weights
        arrive."""

    @property
    @abstractmethod
    def connected(self) -> bool:
        """True while the engines are believed to be in the policy's process group."""

    @abstractmethod
    def disconnect(self) -> None:
        """Mark the policy's process group as unusable, for example after an error. The next refit creates a
        new one."""

    @abstractmethod
    def results(self, futures: list[Any]) -> list[Any]:
        """Wait for futures of ``init_collective``, ``update_weights_from_collective`` or
        ``update_weights_from_policy``, and return their results.

        Raises:
            MegarlError: one of the calls failed.
        """

    @abstractmethod
    def loaded(self, versions: list[Any]) -> None:
        """Store the results of ``update_weights_from_collective`` or ``update_weights_from_policy``, from
        which ``version`` follows."""

    def meet(self, mailboxes: Mapping[str, MailboxHandle]) -> int:
        """Connect the engine ranks to the policy ranks on the same devices. If the mailboxes have not
        changed, the engines are not called.

        Args:
            mailboxes: ``Policy.mailboxes``.

        Returns:
            A session id, by which policy ranks recognize these engines' ranks; pass it to
            ``Policy.hand_over_weights``.
        """
        bound = (
            f"{type(self).__name__} takes no weights on the policy's devices: it does not implement meet()"
        )
        fix = (
            "write policy.generation.colocated: {enabled: false, resources: {gpus_per_node: 1}}, "
            "and add that many ranks to cluster"
        )
        raise ConfigError([Violation("policy.generation.colocated.enabled", True, bound, fix)])

    def slices_wanted(self) -> WantedSlices | None:
        """Return the slices of the weights that the engine ranks read; None if they need full weights. The
        engines are called only once.

        Pass the result to ``Policy.send_slices``, and the result of that to ``take_slices``.
        """
        return None

    def take_slices(self, names: Sequence[str]) -> None:
        """Make the engines expect slices of the weights ``names`` in later refits. If the names have not
        changed, the engines are not called."""
        if names:
            raise NotImplementedError(f"{type(self).__name__} takes full weights, not slices")

    def update_weights_from_policy(self, ticket: int) -> list[Any]:
        """Receive all weights of a refit from the policy ranks on the same devices. Call this together with
        ``Policy.hand_over_weights``.

        Args:
            ticket: id of the refit.

        Returns:
            Futures; pass their results to ``loaded``.
        """
        raise NotImplementedError(
            f"{type(self).__name__} takes no weights on the policy's devices: write colocated.enabled: false"
        )

    def score(self, data: BatchedDataDict[Any]) -> list[torch.Tensor] | None:
        """Return each engine's log-probabilities of given tokens, [B, S] float32, laid out like those of
        ``Policy.get_logprobs``. They come from the model as the engine serves it, without a KV cache. None if
        the engines cannot compute them.

        Args:
            data: ``input_ids`` [B, S] right-padded, ``input_lengths`` [B].
        """
        return None

    def weight_digests(self) -> list[dict[str, int]] | None:
        """Return, for each rank, the ``Policy.weight_digests`` of the model copy to which the rank belongs,
        computed from the loaded parameters. None if the engines convert weights to other formats.

        Copies of a parameter that differ are listed under additional names.
        """
        return None

    def is_alive(self) -> bool:
        """Return whether all engines still reply. It is called after a call of an engine has failed; if it
        returns False, ``restart`` is called.

        An engine that cannot be restarted may always return True. Its errors then end the run.
        """
        return True

    def restart(self, policy: SharesDevices | None = None) -> None:
        """Replace all engines by new ones. The new engines know the names, shapes and dtypes of the weights,
        and reject generation until a complete refit.

        Args:
            policy: the policy whose weights the engines get. If it is on the same devices, it is offloaded
                while they start.

        Raises:
            MegarlError: an engine could not be started; those already started are shut down.
        """
        raise NotImplementedError(
            f"{type(self).__name__} cannot be restarted: write cluster.max_engine_restarts: 0"
        )

    def shutdown(self) -> bool:
        """Shut down the engines. Return True if all of them exited cleanly."""
        return True
