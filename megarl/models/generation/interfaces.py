"""Interfaces of generation engines: configuration, input, output, and the check of right padding."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal, NotRequired, TypeAlias

from typing_extensions import TypedDict

from megarl.errors import BatchError, ConfigError, Violation
from megarl.key import ABOVE_0, AT_LEAST_0, AT_LEAST_1, POSITIVE_SHARE, Key

if TYPE_CHECKING:
    import ray
    import torch

    from megarl.distributed.batched_data_dict import BatchedDataDict
    from megarl.models.generation.engines import SharesDevices
    from megarl.weight_sync.slices import WantedSlices

Sampling: TypeAlias = Mapping[str, Any]
"""How tokens are drawn: ``temperature``, ``top_p`` and ``top_k``, as in a generation configuration."""

LENGTH_KEYS = (("input_ids", "input_lengths"), ("output_ids", "unpadded_sequence_lengths"))


class ResourcesConfig(TypedDict):
    """Resources of a generation engine of its own."""

    gpus_per_node: NotRequired[Annotated[int | None, Key("its worker ranks a node; null for all of a node.")]]
    num_nodes: NotRequired[Annotated[int | None, Key("its nodes; null for a part of the only node.")]]


class ColocationConfig(TypedDict):
    """Whether generation shares its devices with training."""

    enabled: Annotated[bool, Key("the same devices serve both, in turn.")]
    resources: NotRequired[Annotated[ResourcesConfig, Key("the engine's own devices when ``enabled`` is false.")]]


class VllmConfig(TypedDict):
    """vLLM engines."""

    tensor_parallel_size: NotRequired[
        Annotated[
            int,
            Key(
                "ranks that share each layer; an engine has them times ``pipeline_parallel_size``, and as many engines are started as "
                "the places allow. They are on one node, or fill whole nodes: 32 are an engine over four nodes of 8.",
                AT_LEAST_1,
                default=1,
            ),
        ]
    ]
    pipeline_parallel_size: NotRequired[
        Annotated[int, Key("parts of the layers, each on ranks of its own; 1 on a CPU.", AT_LEAST_1, default=1)]
    ]
    expert_parallel_size: NotRequired[
        Annotated[
            int,
            Key(
                "ranks that the experts of a mixture are divided over: 1 cuts each of them over ``tensor_parallel_size`` ranks, "
                "``tensor_parallel_size`` gives each rank whole ones; 1 on a CPU.",
                AT_LEAST_1,
                default=1,
            ),
        ]
    ]
    fast_sampling: NotRequired[
        Annotated[
            bool,
            Key(
                "one seed an engine and call instead of one a response, with which the fast sampler of vLLM's first model runner runs; "
                "GPUs take the second one, where it would gain nothing and is refused. Given up: that a response is the same whatever "
                "else is in the batch and however many engines there are.",
                default=False,
            ),
        ]
    ]
    async_engine: NotRequired[Annotated[Literal[False], Key("false: a batch of prompts is answered as a whole.", default=False)]]
    precision: NotRequired[
        Annotated[Literal["float32", "bfloat16", "float16"], Key("type of the engine's weights; the policy's when absent.")]
    ]
    max_model_len: NotRequired[
        Annotated[int, Key("most tokens of prompt and answer together; the policy's longest sequence when absent.", AT_LEAST_1)]
    ]
    gpu_memory_utilization: NotRequired[
        Annotated[float, Key("share of a GPU's memory that an engine may take, weights and cache together.", POSITIVE_SHARE, default=0.6)]
    ]
    kv_cache_gb: NotRequired[
        Annotated[
            float | None,
            Key(
                "GiB of an engine's cache of keys and values; null for what ``gpu_memory_utilization`` leaves, and 1 on a CPU.",
                ABOVE_0,
                default=None,
            ),
        ]
    ]
    enforce_eager: NotRequired[
        Annotated[bool, Key("run without compiling the model: starts sooner and generates more slowly.", default=False)]
    ]
    load_format: NotRequired[
        Annotated[
            Literal["dummy", "auto"],
            Key(
                "``dummy``: weights come with the first refit alone; ``auto``: they are read from the model's files before that too.",
                default="dummy",
            ),
        ]
    ]
    env_vars: NotRequired[Annotated[dict[str, str] | None, Key("environment variables of the engines.", default={})]]


class GenerationConfig(TypedDict):
    """Generation of responses."""

    backend: NotRequired[
        Annotated[
            str,
            Key(
                "`megatron` or `hf` (DTensor and FSDP1): the policy itself, also when absent; `vllm`; or the import path "
                "of an engine, `path/to/file.py:KIND`, see `megarl.models.generation.engines`."
            ),
        ]
    ]
    max_new_tokens: Annotated[int, Key("longest answer in tokens.", AT_LEAST_1)]
    temperature: NotRequired[
        Annotated[
            float,
            Key(
                "logits are divided by it, in sampling and wherever log-probabilities are computed.",
                ABOVE_0,
                default=1.0,
                advice="sample at 1.0; greedy decoding is asked for call by call",
            ),
        ]
    ]
    top_p: NotRequired[
        Annotated[
            float,
            Key(
                "smallest set of tokens with at least this probability is kept, in sampling and in log-probabilities; 1 keeps all.",
                POSITIVE_SHARE,
                default=1.0,
            ),
        ]
    ]
    top_k: NotRequired[
        Annotated[
            int | None,
            Key(
                "only this many tokens are kept, in sampling and in log-probabilities; null keeps all.",
                AT_LEAST_1,
                default=None,
                advice="write null to keep all tokens",
            ),
        ]
    ]
    val_temperature: NotRequired[
        Annotated[
            float,
            Key(
                "the temperature of a validation; 0 takes the likeliest token always. A source of ``data.validation`` may have its own, "
                "and its own ``val_top_p`` and ``val_top_k``.",
                AT_LEAST_0,
                default=0.0,
            ),
        ]
    ]
    val_top_p: NotRequired[Annotated[float, Key("``top_p`` of a validation that samples.", POSITIVE_SHARE, default=1.0)]]
    val_top_k: NotRequired[
        Annotated[
            int | None,
            Key(
                "``top_k`` of a validation that samples; null keeps all.", AT_LEAST_1, default=None, advice="write null to keep all tokens"
            ),
        ]
    ]
    model_name: NotRequired[Annotated[str, Key("model of the engine; the policy's, also when absent.")]]
    stop_token_ids: NotRequired[
        Annotated[
            list[int] | None,
            Key(
                "tokens that end a response; null or absent for all that the tokenizer, `generation_config.json`, `config.json` and the "
                "chat template name.",
                default=None,
            ),
        ]
    ]
    stop_strings: NotRequired[Annotated[list[str] | None, Key("texts that end an answer.", default=None)]]
    pad_token_id: NotRequired[Annotated[int, Key("fills answers up; the tokenizer's when absent.", AT_LEAST_0)]]
    colocated: NotRequired[Annotated[ColocationConfig, Key("whether training and generation share devices.", default={"enabled": True})]]
    vllm_cfg: NotRequired[Annotated[VllmConfig, Key("vLLM engines; read where ``backend`` is vllm.")]]
    vllm_kwargs: NotRequired[
        Annotated[
            dict[str, Any],
            Key(
                "further arguments of vLLM's ``LLM``, over what ``vllm_cfg`` gives it; not those that refits and log-probabilities rest on."
            ),
        ]
    ]


class GenerationDatumSpec(TypedDict):
    """Input of ``generate``.

    Attributes:
        input_ids: int64 [B, S], right-padded prompts.
        input_lengths: int64 [B], tokens without padding.
        stop_strings: texts that end the answer, per sample.
        sampling_seeds: int64 [B]; the random numbers of a row depend on its seed alone.
    """

    input_ids: torch.Tensor
    input_lengths: torch.Tensor
    stop_strings: NotRequired[list[list[str] | None]]
    sampling_seeds: NotRequired[torch.Tensor]


class GenerationOutputSpec(TypedDict):
    """Output of ``generate``.

    Attributes:
        output_ids: int64 [B, S'], prompt and answer, right-padded with the pad token.
        generation_lengths: int64 [B], tokens of the answer.
        unpadded_sequence_lengths: int64 [B], tokens of prompt and answer.
        logprobs: float32 [B, S'], of the tokens of the answer; 0 on the prompt and on padding. NaN where the engine does not know them:
            vLLM gives those of greedy tokens before the temperature, so that they count only where that is 1.
    """

    output_ids: torch.Tensor
    generation_lengths: torch.Tensor
    unpadded_sequence_lengths: torch.Tensor
    logprobs: torch.Tensor


def verify_right_padding(data: BatchedDataDict[Any], pad_value: int = 0, raise_error: bool = True) -> tuple[bool, str | None]:
    """Check that nothing but ``pad_value`` follows the last token of any row.

    Args:
        data: holds ``input_ids`` and ``input_lengths``, or ``output_ids`` and ``unpadded_sequence_lengths``: int64 [B, S] and [B].
        pad_value: the pad token.
        raise_error: raise for a badly padded row instead of returning the message.

    Returns:
        (True, None), or (False, message) for a badly padded row when ``raise_error`` is false.

    Raises:
        BatchError: the data cannot be checked (wrong type, keys, shapes or lengths), or, with ``raise_error``, a row is badly padded.
    """
    token_key, tokens, lengths = _padded_pair(data, pad_value)
    if tokens.shape[1] == 0:
        return True, None
    import torch

    beyond = torch.arange(tokens.shape[1], device=tokens.device)[None, :] >= lengths.to(tokens.device)[:, None]
    wrong = beyond & (tokens != pad_value)
    if not bool(wrong.any()):
        return True, None
    row, column = (int(index) for index in wrong.nonzero()[0])
    message = (
        f"{token_key}[{row}, {column}] = {int(tokens[row, column])}: non-padding token after the sequence's {int(lengths[row])} tokens; "
        f"only the pad token {pad_value} may stand there. Pad on the right, and with that token"
    )
    if raise_error:
        raise BatchError(message)
    return False, message


def _padded_pair(data: BatchedDataDict[Any], pad_value: int) -> tuple[str, torch.Tensor, torch.Tensor]:
    """The tokens and lengths to check, and the key of the tokens, after all checks of type and shape."""
    from megarl.distributed.batched_data_dict import BatchedDataDict

    if not isinstance(data, BatchedDataDict):
        raise BatchError(f"data must be a BatchedDataDict, got {type(data).__name__}: wrap the dictionary in BatchedDataDict(...)")
    if pad_value is None:
        raise BatchError("pad_value = None: the pad token's id is needed to tell padding from tokens; give the tokenizer's pad_token_id")
    for token_key, length_key in LENGTH_KEYS:
        if token_key in data and length_key in data:
            break
    else:
        raise BatchError(
            "data must contain either input_ids and input_lengths, or output_ids and unpadded_sequence_lengths; "
            f"it contains {sorted(map(str, data.keys()))}"
        )
    tokens, lengths = data[token_key], data[length_key]
    if tokens.ndim != 2:
        raise BatchError(f"{token_key} must be 2-D [batch, sequence], got {tokens.ndim}-D of shape {tuple(tokens.shape)}")
    if tuple(lengths.shape) != (tokens.shape[0],):
        raise BatchError(
            f"{length_key} has shape {tuple(lengths.shape)}, expected ({tokens.shape[0]},): one length for each row of {token_key}"
        )
    if lengths.numel() and (int(lengths.max()) > tokens.shape[1] or int(lengths.min()) < 0):
        raise BatchError(
            f"{length_key} ranges from {int(lengths.min())} to {int(lengths.max())}: every length must lie between 0 and "
            f"the width {tokens.shape[1]} of {token_key}"
        )
    return token_key, tokens, lengths


class GenerationInterface(ABC):
    """An engine that completes prompts."""

    @abstractmethod
    def init_collective(self, ip: str, port: int, world_size: int) -> list[ray.ObjectRef[Any]]:
        """Join the process group that weights arrive by. Returns futures."""

    @abstractmethod
    def generate(
        self, data: BatchedDataDict[GenerationDatumSpec], greedy: bool, *, sampling: Sampling | None = None
    ) -> BatchedDataDict[GenerationOutputSpec]:
        """Complete every prompt.

        Args:
            data: the prompts.
            greedy: take the likeliest token instead of sampling.
            sampling: ``temperature``, ``top_p`` and ``top_k`` in place of the configured ones; an engine that is never validated by
                sampling need not take it.
        """

    @abstractmethod
    def prepare_for_generation(self, *args: Any, **kwargs: Any) -> bool:
        """Make ready to generate."""

    @abstractmethod
    def finish_generation(self, *args: Any, **kwargs: Any) -> bool:
        """Give the devices back."""

    def prepare_refit_info(self, state_dict_info: dict[str, Any]) -> None:
        """Learn the names, shapes and types of the weights that will arrive."""
        raise NotImplementedError

    def update_weights_from_ipc_handles(self, ipc_handles: dict[str, Any]) -> bool:
        """Take weights from handles of device memory; False when that failed."""
        raise NotImplementedError

    def update_weights(self, ipc_handles: dict[str, Any]) -> bool:
        """Older name of ``update_weights_from_ipc_handles``."""
        return self.update_weights_from_ipc_handles(ipc_handles)

    def update_weights_from_collective(self) -> list[ray.ObjectRef[Any]]:
        """Take weights from the process group of ``init_collective``. Returns futures."""
        raise NotImplementedError


class RolloutEngine(GenerationInterface):
    """Engines beside the policy, which get its weights by refits.

    Beyond ``GenerationInterface``, of which ``init_collective`` connects engines to a policy elsewhere and ``update_weights_from_*``
    receive weights, this is what a refit needs to know of them.
    """

    @property
    @abstractmethod
    def version(self) -> int | None:
        """Version of the weights that all engines have; None where they differ, or have none."""

    @property
    @abstractmethod
    def ranks(self) -> int:
        """Ranks of all engines, each of which is a rank of the group that weights arrive by."""

    @property
    @abstractmethod
    def connected(self) -> bool:
        """Whether the engines are in the policy's group, as far as is known."""

    @abstractmethod
    def disconnect(self) -> None:
        """Forget the policy's group, which may be broken; the next refit makes another."""

    @abstractmethod
    def results(self, futures: list[Any]) -> list[Any]:
        """Wait for futures of ``init_collective``, ``update_weights_from_collective`` or ``update_weights_from_policy``.

        Raises:
            MegarlError: one of them failed.
        """

    @abstractmethod
    def loaded(self, versions: list[Any]) -> None:
        """Take note of the results of ``update_weights_from_collective`` or ``update_weights_from_policy``."""

    def meet(self, mailboxes: Mapping[str, Any]) -> int:
        """Learn where the ranks of a policy on the same devices hand weights over; nothing is said to engines that know it.

        Args:
            mailboxes: ``Policy.mailboxes``.

        Returns:
            A number by which the policy's ranks tell the ranks of these engines from others (``Policy.hand_over_weights``).
        """
        bound = f"{type(self).__name__} takes no weights on the policy's devices: it has no meet"
        fix = "write policy.generation.colocated: {enabled: false, resources: {gpus_per_node: 1}}, and as many ranks more in cluster"
        raise ConfigError([Violation("policy.generation.colocated.enabled", True, bound, fix)])

    def slices_wanted(self) -> WantedSlices | None:
        """What the engines' ranks read of the weights, asked of them once; None where they take whole weights. For
        ``Policy.send_slices``, whose answer goes to ``take_slices``."""
        return None

    def take_slices(self, names: Sequence[str]) -> None:
        """Learn which weights come as slices from now on; nothing is said to engines that know it."""
        if names:
            raise NotImplementedError(f"{type(self).__name__} takes whole weights")

    def update_weights_from_policy(self, ticket: int) -> list[Any]:
        """Take all weights of a refit from the policy's ranks on the same devices, to be called beside ``Policy.hand_over_weights``.

        Args:
            ticket: number of the refit.

        Returns:
            Futures, whose results go to ``loaded``.
        """
        raise NotImplementedError(f"{type(self).__name__} takes no weights on the policy's devices: write colocated.enabled: false")

    def is_alive(self) -> bool:
        """Whether all engines still answer; asked after a call of theirs has failed. Where not, ``restart`` follows.

        An engine that cannot be restarted need not say: its errors end the run.
        """
        return True

    def restart(self, policy: SharesDevices | None = None) -> None:
        """Start new engines in place of all present ones. They know what weights will arrive, and are refused until a whole refit.

        Args:
            policy: whose weights they get; where it is on the same devices, it leaves them meanwhile.

        Raises:
            MegarlError: an engine could not be made; none is left behind.
        """
        raise NotImplementedError(f"{type(self).__name__} cannot be restarted: write cluster.max_engine_restarts: 0")

    def shutdown(self) -> bool:
        """End the engines; whether all ended cleanly."""
        return True
