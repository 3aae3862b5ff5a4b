"""The driver's handle of a policy whose model is distributed over Ray actors. It validates and shards
batches, calls the workers and collects their results; it runs no model computation itself."""

from __future__ import annotations

import functools
import logging
import operator
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from os import PathLike as OsPathLike
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import numpy as np

from converters.checkpoint.source import open_source
from megarl import env
from megarl.algorithms.interfaces import LossFunction, check_loss
from megarl.config import validate_policy_config
from megarl.config.backend import enabled_backend, scores
from megarl.config.engines import is_engine
from megarl.config.policy import PolicyConfig
from megarl.distributed.allocator import fast_pinning
from megarl.distributed.batch_checks import check_batch, check_scored_tokens
from megarl.distributed.batched_data_dict import BatchedDataDict, DealtRows
from megarl.distributed.deadlines import PhaseDeadlines
from megarl.distributed.device import FULL_FLOAT32
from megarl.distributed.named_sharding import NamedSharding
from megarl.distributed.virtual_cluster import RayVirtualCluster
from megarl.distributed.worker_groups import MultiWorkerFuture, RayWorkerBuilder, RayWorkerGroup
from megarl.errors import BatchError, ConfigError, NonFiniteError, RefitError, StateError
from megarl.models.engine.microbatches import chosen_size
from megarl.models.generation import configure_generation_config
from megarl.models.generation.interfaces import (
    GENERATION_INPUTS,
    GenerationDatumSpec,
    GenerationInterface,
    GenerationOutputSpec,
    Sampling,
)
from megarl.models.generation.sampling import seeds_of_call
from megarl.models.generation.stopping import stop_strings_of_rows
from megarl.models.policy.batch_plan import ShardedBatch, shard_batch
from megarl.models.policy.interfaces import (
    ColocatablePolicyInterface,
    LogprobOutputSpec,
    ReferenceLogprobOutputSpec,
    ScoreOutputSpec,
    TopkLogitsOutputSpec,
    ValueOutputSpec,
)
from megarl.throughput.peaks import known_peak
from megarl.weight_sync.manifest import Description, Manifest
from megarl.weight_sync.slices import WantedSlices, names_digest

if TYPE_CHECKING:
    import ray
    import transformers

    from megarl.models.engine.passing import WorkerTrainResult
    from megarl.models.engine.shared_base import SharedBase
    from megarl.weight_sync.mailbox import CarriedPayload, MailboxHandle

logger = logging.getLogger(__name__)

PathLike = str | OsPathLike[str]
WORKERS = {
    "megatron": "megarl.models.policy.megatron_policy_worker.MegatronPolicyWorker",
    "dtensor": "megarl.models.policy.dtensor_policy_worker.DTensorPolicyWorker",
    "fsdp1": "megarl.models.policy.fsdp1_policy_worker.FSDP1PolicyWorker",
}
AXES = ["pipeline_parallel", "data_parallel", "context_parallel", "tensor_parallel"]
REPLICATED = ["context_parallel", "tensor_parallel", "pipeline_parallel"]
DRIVER_FIRST_S = 60.0
"""Seconds added to the longest call's time limit to get the timeout of the workers' collectives. The driver
sees all ranks and gives the better error, so its time limit must expire first."""
# Columns that NeMo-RL's ``GenerationOutputSpec`` requires.
GENERATION_KEYS = ("output_ids", "generation_lengths", "unpadded_sequence_lengths", "logprobs")


class Policy(ColocatablePolicyInterface, GenerationInterface):
    """A policy whose workers run on the bundles of a cluster.

    Args:
        cluster: provides the bundles, one per worker.
        config: the policy configuration.
        tokenizer: tokenizer of the model.
        name_prefix: prefix of the workers' names.
        workers_per_node: see ``RayWorkerGroup``.
        init_optimizer: False for a policy that is not trained.
        weights_path: checkpoint to load after ``model_name``'s weights.
        optimizer_path: optimizer checkpoint to load with ``weights_path``.
        init_reference_model: keep the weights of ``model_name`` as the reference policy.
        seed: seed of the workers' random generators. Also gives the sampling seeds of batches without
            ``sampling_seeds``.
        init_timeout_s: time limit in seconds for starting the workers.
        call_timeout_s: time limit in seconds of each call.
        deadlines: time limits per phase, used instead of ``call_timeout_s``. The timeout of the workers'
            collectives is longer than any of these limits.
        check_collectives: compare every collective across its ranks before it starts, and name the ranks that
            differ; slow.

    Attributes:
        generate_calls: number of successful calls of ``generate``.

    Raises:
        ConfigError: the configuration is invalid, or its parallel layout does not match the cluster's size.
        MegarlError: a worker could not be created; the workers that were already running are stopped.
    """

    # Until ``send_slices`` is called, engines receive full weights.
    _wanted_slices: WantedSlices | None = None
    _sliced_names: Sequence[str] = ()

    def __init__(
        self,
        cluster: RayVirtualCluster,
        config: PolicyConfig,
        tokenizer: transformers.PreTrainedTokenizerBase,
        name_prefix: str = "lm_policy",
        workers_per_node: int | list[int] | None = None,
        init_optimizer: bool = True,
        weights_path: PathLike | None = None,
        optimizer_path: PathLike | None = None,
        init_reference_model: bool = True,
        *,
        seed: int = 0,
        init_timeout_s: float = 600.0,
        call_timeout_s: float = 3600.0,
        deadlines: PhaseDeadlines | None = None,
        check_collectives: bool = False,
    ) -> None:
        # Validate before any actor is started: an error of the configuration should not cost a start of
        # workers.
        config = validate_policy_config(config, cluster.world_size())
        if config["generation"] is not None and tokenizer is not None:
            config["generation"] = configure_generation_config(
                config["generation"], tokenizer, model_name=config["model_name"]
            )
        # Keep the configuration with its defaults: other methods index optional keys without a check.
        backend = enabled_backend(config)
        self.cfg = config
        self.tokenizer = tokenizer
        self.sharding_annotations = _sharding(config, cluster.world_size())
        self._seed = seed
        self.generate_calls = 0
        self._memory_after_train: tuple[int, list[dict[str, Any]]] = (-1, [])
        facts = open_source(config["model_name"]).read_json("config.json") or {}
        # The config of a multimodal model has the text model's sizes in a section of its own.
        facts = facts.get("text_config") or facts
        self._vocab_size, self._hidden_size = int(facts["vocab_size"]), int(facts["hidden_size"])
        builder = RayWorkerBuilder(
            WORKERS[backend],
            config,
            tokenizer=tokenizer,
            init_optimizer=init_optimizer,
            weights_path=_absolute(weights_path),
            optimizer_path=_absolute(optimizer_path),
            init_reference_model=init_reference_model,
            worker_sharding_annotations=self.sharding_annotations,
            # An argument of NeMo-RL's workers, which megarl's workers ignore.
            pre_init_communication_queue=None,
            seed=seed,
            collective_timeout_s=(call_timeout_s if deadlines is None else deadlines.longest_s)
            + DRIVER_FIRST_S,
            check_collectives=check_collectives,
        )
        self.worker_group = RayWorkerGroup(
            cluster,
            builder,
            workers_per_node=workers_per_node,
            name_prefix=name_prefix,
            sharding_annotations=self.sharding_annotations,
            env_vars={
                "MEGARL_DEVICE": "cuda" if cluster.use_gpus else "cpu",
                **worker_environment(config, cluster.use_gpus),
            },
            init_timeout_s=init_timeout_s,
            call_timeout_s=call_timeout_s,
            deadlines=deadlines,
        )

    @property
    def data_parallel_size(self) -> int:
        """Number of data-parallel replicas of the model."""
        return self.sharding_annotations.get_axis_size("data_parallel")

    @property
    def vocab_size(self) -> int:
        """Number of tokens for which the model has a logit."""
        return self._vocab_size

    # Log-probabilities.

    def get_logprobs(
        self, data: BatchedDataDict[GenerationDatumSpec], *, skip_masked: bool = False
    ) -> BatchedDataDict[LogprobOutputSpec]:
        return self._token_columns("get_logprobs", ["logprobs"], data, {"skip_masked": skip_masked})

    def get_reference_policy_logprobs(
        self,
        data: BatchedDataDict[GenerationDatumSpec],
        micro_batch_size: int | None = None,
        *,
        skip_masked: bool = False,
    ) -> BatchedDataDict[ReferenceLogprobOutputSpec]:
        """Compute log-probabilities under the reference policy. ``micro_batch_size`` overrides
        ``logprob_batch_size``."""
        rows = chosen_size(micro_batch_size, self.cfg["logprob_batch_size"], "micro-batch size")
        options = {"micro_batch_size": rows, "skip_masked": skip_masked}
        return self._token_columns("get_reference_policy_logprobs", ["reference_logprobs"], data, options)

    def get_topk_logits(
        self,
        data: BatchedDataDict[GenerationDatumSpec],
        k: int,
        micro_batch_size: int | None = None,
        *,
        skip_masked: bool = False,
        vocabulary_size: int | None = None,
    ) -> BatchedDataDict[TopkLogitsOutputSpec]:
        """Compute the ``k`` most likely next tokens at each position and the result of ``get_logprobs``, in
        one forward pass. Rows keep their order.

        Args:
            data: batch as in ``get_logprobs``.
            k: number of tokens, at most the vocabulary size. The sampling settings in ``policy.generation``
                must not exclude any token.
            micro_batch_size: overrides ``logprob_batch_size``.
            skip_masked: as in ``get_logprobs``. Positions whose next token is masked are 0.
            vocabulary_size: vocabulary size of the student model. Models with the same tokenizer may pad the
                output layer to different sizes; rows beyond this size are ignored. None uses all rows.

        Raises:
            BatchError: the batch is invalid, or ``k`` is not between 1 and the vocabulary size.
            ConfigError: sampling excludes tokens.
            StateError: the model is a reward or value model.
        """
        # A teacher may have more rows than the student, or fewer.
        size = min(self.vocab_size, vocabulary_size or self.vocab_size)
        if not 1 <= k <= size:
            raise BatchError(
                f"k = {k}: must be from 1 to the vocabulary's size {size}. Fix: give such a number"
            )
        rows = chosen_size(micro_batch_size, self.cfg["logprob_batch_size"], "micro-batch size")
        options = {
            "k": k,
            "micro_batch_size": rows,
            "skip_masked": skip_masked,
            "vocabulary_size": vocabulary_size,
        }
        return self._token_columns(
            "get_topk_logits", ("topk_logits", "topk_indices", "logprobs"), data, options
        )

    def get_values(self, data: BatchedDataDict[GenerationDatumSpec]) -> BatchedDataDict[ValueOutputSpec]:
        """Return the scalar output of a reward or value model (``policy.reward_model_cfg``) at each token of
        ``data``. Rows keep their order."""
        return self._token_columns("get_values", ["values"], data, {})

    def score(self, data: BatchedDataDict[GenerationDatumSpec]) -> BatchedDataDict[ScoreOutputSpec]:
        """Return the score of each sequence of ``data``: the output of a reward or value model at the last
        token."""
        values = self.get_values(data)["values"]
        return BatchedDataDict(
            {"scores": values.gather(1, data["input_lengths"].long()[:, None] - 1).squeeze(1)}
        )

    def _token_columns(
        self, method: str, keys: Sequence[str], data: BatchedDataDict[Any], options: Mapping[str, object]
    ) -> BatchedDataDict[Any]:
        skips = options.get("skip_masked", False)
        self._check(data, required=["token_mask"] if skips else [])
        masks = [name for name in ("token_mask", "sample_mask") if skips and name in data]
        needed: BatchedDataDict[Any] = BatchedDataDict(
            # Send only the columns that the workers read: the batch travels over the network.
            {name: data[name] for name in ("input_ids", "input_lengths", *masks)}
        )
        sharded = shard_batch(
            needed, self.cfg, self.data_parallel_size, phase="logprob", hidden_size=self._hidden_size
        )
        results = self._call_sharded(method, sharded.dealt, options)
        return BatchedDataDict({key: sharded.restore([result[key] for result in results]) for key in keys})

    # Training.

    def train(
        self,
        data: BatchedDataDict[Any],
        loss_fn: LossFunction,
        eval_mode: bool = False,
        gbs: int | None = None,
        mbs: int | None = None,
    ) -> dict[str, Any]:
        """Take one optimizer step for each global batch in ``data``; see ``PolicyInterface.train``.

        Returns:
            The result of ``PolicyInterface.train``, where ``grad_norm`` is the 0-d tensor of the last global
            batch and ``all_mb_metrics`` contains the values of all micro-batches of all data-parallel
            replicas. Also ``skipped``, which lists the global batches whose optimizer step was skipped, each
            with the reason and the rows of ``data`` where the fault was first seen, and ``positions``, the
            number of positions in the forward passes, including padding.

        Raises:
            ConfigError: ``loss_fn`` does not have the signature of a loss, for example because it expects
                logits.
            BatchError: the batch is invalid for training.
            NonFiniteError: a loss or gradient is not finite, and ``policy.on_nonfinite`` or
                ``policy.max_consecutive_skips`` does not allow training to continue. The error's ``skipped``
                has the form of the result's.
        """
        # Check before anything is sent. The workers repeat the check for callers that run them without a
        # driver.
        check_loss(loss_fn, scores=scores(self.cfg))
        token_level = getattr(getattr(loss_fn, "loss_type", None), "value", None) == "token_level"
        # Name of the column with additional tokens per position whose log-probabilities this loss needs.
        scored = getattr(loss_fn, "scored_tokens", None)
        self._check(
            data,
            required=[
                "sample_mask",
                *(["token_mask"] if token_level else []),
                *([] if scored is None else [scored]),
            ],
        )
        if scored is not None:
            check_scored_tokens(data, scored, self._vocab_size)
        global_batch = chosen_size(gbs, self.cfg["train_global_batch_size"], "global batch size")
        micro_batch = chosen_size(mbs, self.cfg["train_micro_batch_size"], "micro-batch size")
        # A preference loss compares the rows of a pair, so both must be in one micro-batch.
        together = getattr(loss_fn, "rows_together", 1)
        self._check_batch_arithmetic(data.size, global_batch, micro_batch, together)
        sharded = shard_batch(
            data,
            self.cfg,
            self.data_parallel_size,
            phase="train",
            global_batch=global_batch,
            rows_together=together,
            hidden_size=self._hidden_size,
        )
        options = {"loss_fn": loss_fn, "eval_mode": eval_mode, "gbs": gbs, "mbs": mbs}
        try:
            future = self._start_sharded("train", sharded.by_stage(self._stages), options)
            answers: list[WorkerTrainResult] = self.worker_group.get_all_worker_results(future.futures)
        except NonFiniteError as error:
            # Workers number the rows of their replica. Convert to row numbers of the caller's batch.
            error.skipped = _with_rows_of_batch(error.skipped, sharded, global_batch)
            raise
        if not eval_mode:
            # Store the call count with the figures: they are current until the next call.
            self._memory_after_train = self.worker_group.calls, [answer["gpu_info"] for answer in answers]
        results: list[WorkerTrainResult] = future.selected(answers)
        metrics: dict[str, list[float]] = defaultdict(list)
        for result in results:
            for name, values in result["all_mb_metrics"].items():
                metrics[name].extend(values)
        # Losses and norms are reduced over all ranks, so any replica's result will do. Metrics are not.
        return {
            "loss": results[0]["global_loss"],
            "grad_norm": results[0]["grad_norm"],
            "all_mb_metrics": dict(metrics),
            "skipped": _with_rows_of_batch(results[0]["skipped"], sharded, global_batch),
            "positions": sum(result["positions"] for result in results),
        }

    def _check_batch_arithmetic(self, rows: int, global_batch: int, micro_batch: int, together: int) -> None:
        replicas = self.data_parallel_size
        if rows % global_batch:
            raise BatchError(
                f"Total batch size ({rows}) is not a multiple of batch_size ({global_batch}): give "
                "complete global batches"
            )
        if global_batch % (replicas * together):
            kept = f" x {together} rows that stay together" if together > 1 else ""
            raise BatchError(
                f"Batch size ({global_batch}) is not a multiple of shards ({replicas} data-parallel "
                f"replicas{kept}): choose a multiple"
            )
        # Packing and dynamic batching choose micro-batches by tokens, so the micro-batch size does not apply.
        if self.cfg["sequence_packing"]["enabled"] or self.cfg["dynamic_batching"]["enabled"]:
            return
        if (global_batch // replicas) % micro_batch:
            raise BatchError(
                f"micro-batch size ({micro_batch}) does not divide the {global_batch // replicas} samples "
                "of a global batch "
                "on one replica: "
                "choose a divisor"
            )
        if micro_batch % together:
            raise BatchError(
                f"micro-batch size ({micro_batch}) is not a multiple of the {together} rows that this loss "
                "reads together"
            )

    # Generation.

    def generate(
        self,
        data: BatchedDataDict[GenerationDatumSpec],
        greedy: bool = False,
        *,
        sampling: Sampling | None = None,
    ) -> BatchedDataDict[GenerationOutputSpec]:
        """Generate a response to every prompt. Rows keep their order.

        In addition to NeMo-RL's columns, the result contains ``truncated`` [B] bool: True if the response
        ended at a length limit rather than at a stop token or string. If ``data`` has no ``sampling_seeds``,
        they are derived from this policy's seed and the number of earlier ``generate`` calls.

        Raises:
            BatchError: the prompts are invalid.
            ConfigError: ``policy.generation`` is missing, or separate engines generate.
        """
        if not isinstance(data, BatchedDataDict):
            raise BatchError(
                f"data must be a BatchedDataDict, got {type(data).__name__}: wrap the dictionary in "
                "BatchedDataDict(...)"
            )
        generation = self.cfg["generation"]
        if generation is None:
            raise ConfigError(
                "policy.generation = None: this policy cannot generate; add the generation section"
            )
        if is_engine(generation):
            raise ConfigError(
                f"policy.generation.backend = {generation['backend']!r}: the engines generate, not the "
                "policy; call their generate()"
            )
        self._check(data)
        # Called for its errors only: the workers combine the strings themselves.
        stop_strings_of_rows(generation["stop_strings"], data.get("stop_strings"), data.size)
        needed = data.select_columns(GENERATION_INPUTS)
        if "sampling_seeds" not in needed:
            needed["sampling_seeds"] = seeds_of_call(self._seed, self.generate_calls, data.size)
        options = {"greedy": greedy, **({} if sampling is None else {"sampling": sampling})}
        results = self._call_sharded(
            "generate", needed.deal(self.data_parallel_size, allow_uneven_shards=True), options
        )
        # Count only successful calls: a retry then uses the seeds of the failed call and samples the same.
        self.generate_calls += 1
        for result in results:
            missing = [key for key in GENERATION_KEYS if key not in result]
            if missing:
                raise ValueError(f"Missing required keys for GenerationOutputSpec: {', '.join(missing)}")
        return BatchedDataDict.from_batches(
            results, pad_value_dict={"output_ids": generation["pad_token_id"]}
        )

    def prepare_for_generation(self, *args: Any, **kwargs: Any) -> bool:
        """Move the parameters to the device. ``policy.offload_optimizer_for_logprob`` decides whether
        gradients and optimizer state stay there."""
        self._prepare("prepare_for_generation")
        return True

    def finish_generation(self, *args: Any, **kwargs: Any) -> bool:
        """Do nothing: the policy generates with its own weights, so there is nothing to release."""
        return True

    # Placement of parameters, gradients and optimizer state.

    def prepare_for_training(self, *args: Any, **kwargs: Any) -> None:
        self._prepare("prepare_for_training")

    def prepare_for_lp_inference(self, *args: Any, **kwargs: Any) -> None:
        """Move the parameters to the device. ``policy.offload_optimizer_for_logprob`` decides whether
        gradients and optimizer state stay there."""
        self._prepare("prepare_for_lp_inference")

    def finish_training(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: ``offload_before_refit`` frees the memory of the training state."""

    def offload_before_refit(self) -> None:
        self._call_all("offload_before_refit")

    def offload_after_refit(self) -> None:
        self._call_all("offload_after_refit")

    # Checkpoints.

    def save_checkpoint(
        self,
        weights_path: PathLike | list[PathLike],
        optimizer_path: PathLike | list[PathLike] | None = None,
        tokenizer_path: PathLike | list[PathLike] | None = None,
    ) -> None:
        """Write a checkpoint that a policy with any parallel layout can load; see
        ``EngineWorker.save_checkpoint``.

        Args:
            weights_path, optimizer_path, tokenizer_path: one path, or a list with one path per rank. Ranks of
                different nodes may write to different directories; the checkpoint is then all their files
                together.
        """
        paths = {
            "weights_path": weights_path,
            "optimizer_path": optimizer_path,
            "tokenizer_path": tokenizer_path,
        }
        for_each: dict[str, Any] = {
            name: list(map(_absolute, path)) for name, path in paths.items() if isinstance(path, list)
        }
        for_all = {name: _absolute(path) for name, path in paths.items() if not isinstance(path, list)}
        if not for_each:
            self._call_all("save_checkpoint", **for_all)
            return
        futures = self.worker_group.run_all_workers_multiple_data(
            "save_checkpoint", common_kwargs=for_all, **for_each
        )
        self.worker_group.get_all_worker_results(futures)

    def load_checkpoint(self, weights_path: PathLike, optimizer_path: PathLike | None = None) -> None:
        """Load a checkpoint from ``save_checkpoint`` into the running workers."""
        self._call_all(
            "load_checkpoint", weights_path=_absolute(weights_path), optimizer_path=_absolute(optimizer_path)
        )

    def export_hf(self, path: PathLike) -> None:
        """Write the current weights as a Hugging Face checkpoint."""
        self._call_all("export_hf", path=_absolute(path))

    # Refits, by three paths: NeMo-RL's IPC handles and megarl's mailboxes for engines on the same devices,
    # and a broadcast for engines on other devices.

    def init_collective(self, ip: str, port: int, world_size: int) -> list[ray.ObjectRef[Any]]:
        """Create the process group over which weights are broadcast to engines on other devices. The engines
        must call ``init_collective`` too.

        Args:
            ip, port: rendezvous address on the host of the policy's first worker. With several pipeline
                stages, the first worker of each stage sends in turn, and joins at the same address.
            world_size: number of ranks of all engines, plus one for the policy, for any number of stages.

        Returns:
            Futures; await them together with the engines' futures.
        """
        return self.worker_group.run_all_workers_single_data(
            "init_collective", ip=ip, port=port, world_size=world_size
        )

    # NeMo-RL's policy API has this name twice: a policy returns the description, an engine receives it. This
    # class implements both interfaces, so the signatures conflict.
    def prepare_refit_info(  # type: ignore[override]
        self, state_dict_info: Any = None
    ) -> Description:
        """Return ``{name: (shape, dtype)}`` of the weights that a refit sends, in sending order. Pass it to
        the engine's ``prepare_refit_info``."""
        return self._results("prepare_refit_info", first_rank_only=True)[0]

    def prepare_weights_for_ipc(self, _refit_buffer_size_gb: int | None = None) -> list[list[str]]:
        """Begin a refit of an engine on the same devices.

        Args:
            _refit_buffer_size_gb: maximum size of a group in GiB. A smaller limit of the workers takes
                precedence.

        Returns:
            The names of all weights in groups. Pass each group to ``get_weights_ipc_handles``, in this order.

        Raises:
            RefitError: a single weight is larger than the maximum size of a group.
        """
        # All ranks pack a group in the same way, so it must fit into the smallest buffer.
        budget = min(self._results("begin_refit"))
        if _refit_buffer_size_gb is not None:
            budget = min(budget, self._bytes_of_group(_refit_buffer_size_gb))
        return [group.names for group in self._manifest.groups(budget)]

    def get_weights_ipc_handles(self, keys: list[str]) -> dict[str, CarriedPayload]:
        """Return the IPC handles of the weights named ``keys``, by device. They become invalid when the
        second group after this one is requested, because the workers alternate between two buffers."""
        # The manifest is cached at the start of the first refit. Test the cache, not the property, which
        # would call the workers.
        if "_manifest" not in self.__dict__:
            raise StateError("no refit is under way: call prepare_weights_for_ipc() first")
        # Send two numbers instead of the names: a mixture-of-experts model has tens of thousands of weights,
        # and this message goes to every worker.
        group = self._manifest.group_named(keys)
        return functools.reduce(
            operator.or_, self._results("get_part_ipc_handles", first=group.first, count=group.count)
        )

    def send_slices(self, wanted: WantedSlices | None) -> Sequence[str]:
        """Let later refits send slices instead of full weights to engines on the same devices, wherever no
        rank needs another rank's shard for its slice.

        Args:
            wanted: the engines' ``slices_wanted``. If it equals that of the previous call, the workers are
                not called.

        Returns:
            The names of the weights that are sent as slices, for the engines' ``take_slices``.
        """
        if wanted != self._wanted_slices:
            # Invalidate the cached property, because the workers create new mailboxes for slices.
            self.__dict__.pop("mailboxes", None)
            # All but the first rank return a digest: with thousands of ranks, the names would be megabytes.
            first, *others = self._results("send_slices", wanted=wanted, first_rank_only=True)
            if any(other != names_digest(first) for other in others):
                raise RefitError(
                    "ranks of the policy chose different weights to send as slices: this is a defect of "
                    "megarl, report it"
                )
            self._wanted_slices, self._sliced_names = wanted, first
        return self._sliced_names

    @functools.cached_property
    def mailboxes(self) -> dict[str, MailboxHandle]:
        """Mailboxes from which engine ranks read weights, by device, for the engines' ``meet``. Fetched from
        the workers once."""
        mailboxes: dict[str, MailboxHandle] = {}
        for own in self._results("mailbox"):
            mailboxes |= own
        return mailboxes

    def hand_over_weights(
        self, session: int, ticket: int, _refit_buffer_size_gb: float | None = None
    ) -> list[ray.ObjectRef[Any]]:
        """Send the current weights to engines on the same devices. Each worker passes them, group by group,
        to the engine rank on its device.

        Args:
            session: result of the engines' ``meet``.
            ticket: id of this refit; pass the same to the engines' ``update_weights_from_policy``.
            _refit_buffer_size_gb: maximum size of a group in GiB. A smaller limit of the workers takes
                precedence.

        Returns:
            Futures; await them together with the engines' futures.

        Raises:
            RefitError: a single weight is larger than the maximum size of a group.
        """
        most = None if _refit_buffer_size_gb is None else self._bytes_of_group(_refit_buffer_size_gb)
        return self.worker_group.run_all_workers_single_data(
            "hand_over_weights", session=session, ticket=ticket, most=most
        )

    def _bytes_of_group(self, buffer_gib: float) -> int:
        budget = int(buffer_gib * 2**30)
        name, nbytes = self._manifest.largest
        if budget < nbytes:
            raise RefitError(
                f"_refit_buffer_size_gb = {buffer_gib}: {name} alone takes {nbytes} bytes; give more, or None"
            )
        return budget

    @functools.cached_property
    def _manifest(self) -> Manifest:
        """Names, shapes and dtypes of the weights that a refit sends. Fetched from the workers once."""
        return Manifest.from_description(self.prepare_refit_info())

    def broadcast_weights_for_collective(self) -> list[ray.ObjectRef[Any]]:
        """Broadcast the current weights over the process group of ``init_collective``. The engines must call
        ``update_weights_from_collective`` too.

        Returns:
            Futures; await them together with the engines' futures.
        """
        return self.worker_group.run_all_workers_single_data("broadcast_weights_for_collective")

    def weight_digests(self) -> dict[str, int]:
        """Return a digest of each weight's bits, by Hugging Face name. It does not depend on the parallel
        layout."""
        return self._results("weight_digests", first_rank_only=True)[0]

    def share_base(self) -> list[SharedBase]:
        """Move the weights that adapters do not change into shared memory. Return the argument for
        ``take_base`` of another policy on the same ranks."""
        return self._results("share_base")

    def take_base(self, shared: Sequence[SharedBase]) -> int:
        """Replace weights by the other policy's copies in shared memory where both are bitwise equal, and
        free this policy's copies.

        Args:
            shared: result of the other policy's ``share_base``.

        Returns:
            Number of bytes that are now shared, summed over all ranks.
        """
        return sum(self._results("take_base", shared=shared))

    # Profiling and shutdown.

    def memory_figures(self) -> dict[str, float]:
        """Return memory and GPU metrics over all workers.

        ``memory_gib`` and ``peak_memory_gib`` are maxima over the workers: the allocator's reserved memory on
        a GPU, or the resident set size on a CPU, now and at its peak. On GPUs, the result also has NVML's
        ``free_memory_gib`` (the minimum over the GPUs), ``power_w`` (the sum) and ``utilization_percent``
        (the mean). Directly after ``train``, all values are those recorded at its end, so no worker is
        called.
        """
        calls, infos = self._memory_after_train
        if calls != self.worker_group.calls:
            infos = self._results("get_gpu_info")
        figures = {"memory_gib": "memory_reserved_mb", "peak_memory_gib": "peak_memory_reserved_mb"}
        memory = {name: max(info[key] for info in infos) / 1024 for name, key in figures.items()}
        return memory | gpu_metrics(infos)

    def peak_flops(self) -> list[float]:
        """Return each worker's peak FLOP/s at the policy's precision. Uses published peaks if all devices are
        known; otherwise all workers measure a large matmul at the same time."""
        known = [
            known_peak(info["device_name"], self.cfg["precision"]) for info in self._results("get_gpu_info")
        ]
        # Use published peaks only if every device has one: their sum with measured rates would mean nothing.
        if all(known):
            return list(filter(None, known))
        return self._results("measure_peak_flops")

    def start_gpu_profiling(self) -> None:
        """Open the CUDA profiler's capture range on all workers."""
        self._call_all("start_gpu_profiling")

    def stop_gpu_profiling(self) -> None:
        """Close the CUDA profiler's capture range on all workers."""
        self._call_all("stop_gpu_profiling")

    def start_torch_profiling(self, ranks: Sequence[int]) -> None:
        """Record with torch's profiler on the given ranks until ``stop_torch_profiling``."""
        self._call_all("start_torch_profiling", ranks=list(ranks))

    def stop_torch_profiling(self, stem: Path) -> list[str]:
        """Stop the recordings, write each to ``<stem>_rank<N>.json``, and return the paths."""
        return list(filter(None, self._results("stop_torch_profiling", stem=stem)))

    def shutdown(self) -> bool:
        """Shut down the workers. Return True if all of them exited cleanly. Further calls are allowed."""
        try:
            return self.worker_group.shutdown(cleanup_method="shutdown")
        except Exception:
            # Do not raise: callers shut down while they handle another error, which this one would hide.
            logger.exception("shutting the policy's workers down failed")
            return False

    def __del__(self) -> None:
        # During interpreter shutdown, modules may already be gone. Ray then ends the workers with their
        # driver.
        group = getattr(self, "worker_group", None)
        if group is not None and sys is not None and not sys.is_finalizing():
            group.shutdown()

    def _check(self, data: BatchedDataDict[Any], required: Sequence[str] = ()) -> None:
        check_batch(
            data,
            required=required,
            vocab_size=self._vocab_size,
            max_length=self.cfg["max_total_sequence_length"],
        )

    def _call_sharded(self, method: str, shards: list[DealtRows], options: Mapping[str, object]) -> list[Any]:
        """Run a method on all workers and return one result per data-parallel replica, in order."""
        return self.worker_group.get_all_worker_results(
            self._start_sharded(method, [shards] * self._stages, options)
        )

    @property
    def _stages(self) -> int:
        return self.sharding_annotations.get_axis_size("pipeline_parallel")

    def _start_sharded(
        self, method: str, by_stage: list[list[DealtRows]], options: Mapping[str, object]
    ) -> MultiWorkerFuture:
        """Start a method on all workers. Each gets the rows of its replica with the columns of its pipeline
        stage."""
        return self.worker_group.run_all_workers_sharded_data(
            method,
            data=by_stage,
            in_sharded_axes=["pipeline_parallel", "data_parallel"],
            replicate_on_axes=["context_parallel", "tensor_parallel"],
            output_is_replicated=REPLICATED,
            common_kwargs=options,
        )

    def _prepare(self, method: str) -> None:
        """Run one of the workers' ``prepare_for_...`` methods.

        If other worker groups share the devices, wait until the tensors have moved. Otherwise the method is
        run before the workers' next call, which saves a round trip.
        """
        if self.worker_group.cluster.max_colocated_worker_groups > 1:
            self._call_all(method)
        else:
            self.worker_group.run_before_next(method)

    def _call_all(self, method: str, **options: Any) -> None:
        self._results(method, **options)

    def _results(self, method: str, **options: Any) -> list[Any]:
        """Run a method on all workers and return their results, ordered by rank."""
        return self.worker_group.get_all_worker_results(
            self.worker_group.run_all_workers_single_data(method, **options)
        )


def gpu_metrics(infos: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Combine the workers' GPU readings into metrics. A metric is omitted if any worker lacks the reading."""
    ways: dict[str, tuple[str, Callable[[Sequence[float]], float]]] = {
        "free_memory_gib": ("free_memory_mb", lambda values: min(values) / 1024),
        "power_w": ("power_w", sum),
        "utilization_percent": ("utilization_percent", fmean),
    }
    metrics = {}
    for name, (key, combine) in ways.items():
        values = [info[key] for info in infos if key in info]
        # Some devices do not report a figure, and a part of them says nothing of all.
        if len(values) == len(infos):
            metrics[name] = combine(values)
    return metrics


def _with_rows_of_batch(
    skipped: Sequence[dict[str, Any]], sharded: ShardedBatch, global_batch: int
) -> list[dict[str, Any]]:
    """Convert the workers' reports of skipped global batches from row numbers of a replica to row numbers of
    the whole batch."""
    translated = []
    for batch in skipped:
        first = batch["global_batch"] * global_batch
        seen = [
            {**each, "rows": sorted(sharded.rows_of(each["data_rank"], *each["rows"]))}
            for each in batch["seen"]
        ]
        translated.append({**batch, "rows": [first, first + global_batch], "seen": seen})
    return translated


def _sharding(config: PolicyConfig, world_size: int) -> NamedSharding:
    """Return the parallel layout of the ranks. From the fastest to the slowest varying axis: tensor, context,
    data and pipeline parallelism."""
    backend = enabled_backend(config)
    pipeline = context = tensor = 1
    if backend == "megatron":
        megatron = config["megatron_cfg"]
        pipeline, context = megatron["pipeline_model_parallel_size"], megatron["context_parallel_size"]
        tensor = megatron["tensor_model_parallel_size"]
    elif backend == "dtensor":
        dtensor = config["dtensor_cfg"]
        context, tensor = dtensor["context_parallel_size"], dtensor["tensor_parallel_size"]
    return NamedSharding(np.arange(world_size).reshape(pipeline, -1, context, tensor), AXES)


def worker_environment(config: PolicyConfig, gpus: bool) -> dict[str, str]:
    """Return the environment variables that the workers get in addition to the driver's: the backend
    section's ``env_vars``, and variables that the parallel layout needs.

    ``CUDA_DEVICE_MAX_CONNECTIONS=1`` gives a GPU one hardware queue, so kernels run in launch order, and a
    tensor- or context-parallel collective of Megatron-Core starts before the matmul that it overlaps with.
    ``NVIDIA_TF32_OVERRIDE=0`` keeps Transformer Engine from rounding the operands of float32 matmuls to TF32.
    For the other variables of GPU workers, see ``allocator.fast_pinning``. Neither is set if the driver's
    environment already has it.
    """
    backend = enabled_backend(config)
    found = fast_pinning() if gpus else {}
    if backend == "fsdp1":
        return found
    megatron = config["megatron_cfg"]
    variables = megatron.get("env_vars") if backend == "megatron" else config["dtensor_cfg"].get("env_vars")
    if gpus and backend == "megatron":
        overlaps = max(megatron["tensor_model_parallel_size"], megatron["context_parallel_size"]) > 1
        # Without such collectives, one queue would only prevent kernels from running concurrently.
        wanted = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"} if overlaps else {}
        if config["precision"] == "float32":
            wanted |= FULL_FLOAT32
        found |= {name: value for name, value in wanted.items() if env.text(name) is None}
    # The configuration's values come last, so they override the defaults above.
    return {**found, **{name: str(value) for name, value in (variables or {}).items()}}


def _absolute(path: PathLike | None) -> str | None:
    # A worker's working directory need not be the driver's.
    return None if path is None else str(Path(path).absolute())
