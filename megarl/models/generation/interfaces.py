"""Interfaces of generation engines: input, output, methods of an engine, and the check of right padding."""

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
    """Input of ``generate``.

    Attributes:
        input_ids: int64 [B, S], right-padded prompts.
        input_lengths: int64 [B], tokens without padding.
        stop_strings: strings that end the response, per sample.
        sampling_seeds: int64 [B]; the random numbers of a row depend only on its seed.
        max_new_tokens: int64 [B], maximum tokens of each response, in addition to the configured limits.
    """

    input_ids: torch.Tensor
    input_lengths: torch.Tensor
    stop_strings: NotRequired[list[list[str] | None]]
    sampling_seeds: NotRequired[torch.Tensor]
    max_new_tokens: NotRequired[torch.Tensor]


GENERATION_INPUTS = tuple(GenerationDatumSpec.__annotations__)
"""Names of the columns that an engine reads."""


class GenerationOutputSpec(TypedDict):
    """Output of ``generate``.

    Attributes:
        output_ids: int64 [B, S'], prompt and response, right-padded with the pad token.
        generation_lengths: int64 [B], tokens of the response.
        unpadded_sequence_lengths: int64 [B], tokens of prompt and response.
        logprobs: float32 [B, S'], of the tokens of the response; 0 on the prompt and on padding. NaN if the
            engine does not know them: vLLM returns those of greedy tokens before the temperature, so they are
            valid only if that is 1.
    """

    output_ids: torch.Tensor
    generation_lengths: torch.Tensor
    unpadded_sequence_lengths: torch.Tensor
    logprobs: torch.Tensor


def verify_right_padding(
    data: BatchedDataDict[Any], pad_value: int = 0, raise_error: bool = True
) -> tuple[bool, str | None]:
    """Check that only ``pad_value`` follows the last token of each row.

    Args:
        data: holds ``input_ids`` and ``input_lengths``, or ``output_ids`` and ``unpadded_sequence_lengths``:
            int64 [B, S] and [B].
        pad_value: the pad token.
        raise_error: raise for a badly padded row instead of returning the message.

    Returns:
        (True, None), or (False, message) for a badly padded row when ``raise_error`` is false.

    Raises:
        BatchError: the data cannot be checked (wrong type, keys, shapes or lengths), or, with
            ``raise_error``, a row is badly padded.
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
    """Return the key of the tokens, the tokens and the lengths to check, after all checks of type and
    shape."""
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
    """An engine that completes prompts."""

    @abstractmethod
    def init_collective(self, ip: str, port: int, world_size: int) -> list[ray.ObjectRef[Any]]:
        """Join the process group through which weights arrive, and return futures."""

    @abstractmethod
    def generate(
        self, data: BatchedDataDict[GenerationDatumSpec], greedy: bool, *, sampling: Sampling | None = None
    ) -> BatchedDataDict[GenerationOutputSpec]:
        """Complete every prompt.

        Args:
            data: the prompts.
            greedy: take the most likely token instead of sampling.
            sampling: ``temperature``, ``top_p`` and ``top_k`` that replace the configured ones; an engine
                that is never validated with sampling need not have this parameter.
        """

    def requests(
        self, stop_token_ids: Iterable[int], pad_token_id: int, *, greedy: bool, sampling: Sampling | None
    ) -> RequestStream:
        """Return a stream of requests; call this when the engine is ready. By default each ``poll`` is one
        call of ``generate``.

        Args:
            stop_token_ids: tokens that end a completion.
            pad_token_id: pads prompts.
            greedy, sampling: see ``generate``.
        """
        from megarl.models.generation.stream import Waves

        return Waves(self, pad_token_id, stop_token_ids, greedy=greedy, sampling=sampling)

    @abstractmethod
    def prepare_for_generation(self, *args: Any, **kwargs: Any) -> bool:
        """Prepare to generate."""

    @abstractmethod
    def finish_generation(self, *args: Any, **kwargs: Any) -> bool:
        """Free the devices."""

    def prepare_refit_info(self, state_dict_info: dict[str, Any]) -> None:
        """Store the names, shapes and dtypes of the weights that will arrive."""
        raise NotImplementedError

    def update_weights_from_ipc_handles(self, ipc_handles: dict[str, Any]) -> bool:
        """Load weights from handles of device memory; return False if that failed."""
        raise NotImplementedError

    def update_weights(self, ipc_handles: dict[str, Any]) -> bool:
        """Load weights as ``update_weights_from_ipc_handles`` does; an older name of that method."""
        return self.update_weights_from_ipc_handles(ipc_handles)

    def update_weights_from_collective(self) -> list[ray.ObjectRef[Any]]:
        """Receive weights from the process group of ``init_collective``, and return futures."""
        raise NotImplementedError


class SharesDevices(Protocol):
    """A policy that shares its devices with engines."""

    def offload_after_refit(self) -> None:
        """Offload the policy from the devices."""

    def prepare_for_lp_inference(self) -> None:
        """Load onto the devices again what log-probabilities need."""


class RolloutEngine(GenerationInterface):
    """Engines that are separate from the policy, and get its weights by refits.

    In ``GenerationInterface``, ``init_collective`` connects engines to a policy on other devices, and
    ``update_weights_from_*`` receive weights. This class adds what a refit needs from the engines.
    """

    @property
    @abstractmethod
    def version(self) -> int | None:
        """Version of the weights that all engines have; None if versions differ, or an engine has no
        weights."""

    @property
    @abstractmethod
    def ranks(self) -> int:
        """Number of ranks of all engines; each is a rank of the process group through which weights
        arrive."""

    @property
    @abstractmethod
    def connected(self) -> bool:
        """True while the engines are in the policy's group, as far as is known."""

    @abstractmethod
    def disconnect(self) -> None:
        """Forget the policy's group, which may be broken; the next refit creates another."""

    @abstractmethod
    def results(self, futures: list[Any]) -> list[Any]:
        """Wait for futures of ``init_collective``, ``update_weights_from_collective`` or
        ``update_weights_from_policy``, and return their results.

        Raises:
            MegarlError: one of them failed.
        """

    @abstractmethod
    def loaded(self, versions: list[Any]) -> None:
        """Record the results of ``update_weights_from_collective`` or ``update_weights_from_policy``."""

    def meet(self, mailboxes: Mapping[str, Any]) -> int:
        """Tell the engines where the ranks of a policy on the same devices provide weights; engines that know
        it are not called.

        Args:
            mailboxes: ``Policy.mailboxes``.

        Returns:
            A number by which the policy's ranks distinguish the ranks of these engines from others
            (``Policy.hand_over_weights``).
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
        """Return the slices of the weights that the engines' ranks read, which are asked only once; None if
        they read full weights. Pass the result to ``Policy.send_slices``, and its result to ``take_slices``.
        """
        return None

    def take_slices(self, names: Sequence[str]) -> None:
        """Set the weights that arrive as slices from now on; engines that know them are not called."""
        if names:
            raise NotImplementedError(f"{type(self).__name__} takes full weights, not slices")

    def update_weights_from_policy(self, ticket: int) -> list[Any]:
        """Receive all weights of a refit from the policy's ranks on the same devices; call this together with
        ``Policy.hand_over_weights``.

        Args:
            ticket: number of the refit.

        Returns:
            Futures, whose results go to ``loaded``.
        """
        raise NotImplementedError(
            f"{type(self).__name__} takes no weights on the policy's devices: write colocated.enabled: false"
        )

    def score(self, data: BatchedDataDict[Any]) -> list[torch.Tensor] | None:
        """Return each engine's log-probabilities of given tokens, [B, S] float32, from the model as the
        engine serves it, without a cache: as ``Policy.get_logprobs``. Engines that cannot compute them return
        None.

        Args:
            data: ``input_ids`` [B, S] right-padded, ``input_lengths`` [B].
        """
        return None

    def weight_digests(self) -> list[dict[str, int]] | None:
        """Return ``Policy.weight_digests`` of the model copy that each rank has a part of, computed from the
        parameters after the load. Copies of a parameter that differ are listed under additional names.
        Engines that store weights in formats of their own return None."""
        return None

    def is_alive(self) -> bool:
        """Return whether all engines still respond; called after one of their calls has failed. If they do
        not, ``restart`` follows.

        An engine that cannot be restarted may return True always: its errors end the run.
        """
        return True

    def restart(self, policy: SharesDevices | None = None) -> None:
        """Replace all engines by new ones. The new engines know which weights will arrive, and do not
        generate before a complete refit.

        Args:
            policy: the policy whose weights they get; if it is on the same devices, it is offloaded while
                they start.

        Raises:
            MegarlError: an engine could not be started; those already started are shut down.
        """
        raise NotImplementedError(
            f"{type(self).__name__} cannot be restarted: write cluster.max_engine_restarts: 0"
        )

    def shutdown(self) -> bool:
        """Shut the engines down; return whether all ended cleanly."""
        return True
