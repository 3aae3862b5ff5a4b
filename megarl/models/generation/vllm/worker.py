"""The worker of one vLLM engine: a Ray actor with the engine, the GPUs of its bundles, and the version of its
weights.

Calls do not hang if a process of the engine dies, and no files are left behind. Ray exposes to an actor only
the GPU of its own bundle; an engine of several ranks also uses the GPUs of the adjacent bundles.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import multiprocessing
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, wait
from multiprocessing import connection
from operator import attrgetter
from typing import Any, cast

import psutil
import ray
import torch
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from megarl import env
from megarl.config.generation import GenerationConfig
from megarl.config.nested import at
from megarl.distributed import ray_calls
from megarl.distributed.batched_data_dict import BatchedDataDict
from megarl.distributed.device import runtime
from megarl.distributed.shared_memory import note_of_full_memory
from megarl.distributed.virtual_cluster import free_port
from megarl.errors import ClusterError, ConfigError, RefitError
from megarl.models.generation.interfaces import Sampling
from megarl.models.generation.vllm import plugin
from megarl.models.generation.vllm.configuration import ONLY_ON_GPUS
from megarl.models.generation.vllm.nodes import Follower, LlmArguments, Part
from megarl.models.generation.vllm.options import AdapterScale, engine_options, ranks_of
from megarl.models.generation.vllm.requests import (
    NO_ROOM,
    Answer,
    answer_of,
    assembled,
    requests_of,
    seed_of_call,
)
from megarl.models.generation.vllm.worker_extension import Failure
from megarl.weight_sync.mailbox import CarriedPayload, MailboxHandle
from megarl.weight_sync.slices import Slice, Slices, slices_digest


def devices_of_places(first: int, count: int, share: float, timeout_s: float = 300.0) -> list[str]:
    """Return the ``CUDA_VISIBLE_DEVICES`` entries of the GPUs of adjacent bundles, in the order of the
    bundles. Call this in an actor on the first of them.

    Args:
        first: index of the actor's bundle in its placement group.
        count: number of bundles.
        share: fraction of its GPU that the actor has. The same fraction of the other GPUs must be free.
        timeout_s: maximum seconds to wait for the other bundles.

    Raises:
        ClusterError: another bundle is in use, or Ray starts no process there.
    """
    if count == 1:
        return _devices()
    group = ray.util.get_current_placement_group()
    places = range(first + 1, first + count)
    # Run a task on each bundle, because Ray exposes to a process only the GPU of its own bundle.
    task: Any = ray.remote(_devices)
    asked = []
    for place in places:
        strategy = PlacementGroupSchedulingStrategy(group, place)
        on_bundle = task.options(num_cpus=0, num_gpus=share, scheduling_strategy=strategy)
        asked.append(ray_calls.submit(on_bundle))
    try:
        return list(itertools.chain(_devices(), *ray_calls.get(asked, timeout=timeout_s)))
    except ray.exceptions.GetTimeoutError as error:
        raise ClusterError(
            f"an engine of {count} ranks from bundle {first} on: Ray did not give it the GPUs of "
            f"bundles {list(places)} in {timeout_s:g} s. Fix: check with `ray status` whether Ray "
            "starts processes there; give the engines bundles of their own, or let the cluster "
            "have more worker groups a bundle"
        ) from error


def _devices() -> list[str]:
    return list(map(str, ray.get_runtime_context().get_accelerator_ids()["GPU"]))


SOCKETS = "VLLM_RPC_BASE_PATH"
# Seconds between two checks of vLLM's processes during a call.
LOOK_SECONDS = 1.0
# Seconds to wait, after a process has died, for the call to fail with vLLM's own error, which gives the
# reason.
LAST_WORDS_SECONDS = 5.0


class Engine:
    """``vllm.LLM``, which runs in this process or starts its own processes.

    Args:
        options: arguments of ``LLM``.
    """

    def __init__(self, options: LlmArguments) -> None:
        from vllm import LLM

        # Directory for the sockets of vLLM's processes. vLLM does not remove them.
        self._sockets = tempfile.TemporaryDirectory(prefix="vllm-", dir=env.text(SOCKETS))
        with env.variables({SOCKETS: self._sockets.name}):
            self._llm = LLM(**options)
        # vLLM does not expose its processes, but they are children of this process.
        self._processes = multiprocessing.active_children()

    @property
    def has_sleep_mode(self) -> bool:
        """True if the engine can free its device memory and allocate it again."""
        return bool(self._llm.llm_engine.vllm_config.model_config.enable_sleep_mode)

    @property
    def is_alive(self) -> bool:
        """True while all of vLLM's processes are running."""
        return all(process.is_alive() for process in self._processes)

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of ``LLM`` or of one of its attributes, such as ``llm_engine.step``.

        Raises:
            RuntimeError: a process of vLLM died during the call. vLLM itself would wait for it indefinitely.
        """
        if not self._processes:
            return attrgetter(method)(self._llm)(*args, **kwargs)
        answer: Future[Any] = Future()
        # Call in a thread, because vLLM waits indefinitely for a process that has died.
        threading.Thread(
            target=self._answer, args=(answer, method, args, kwargs), name=f"vllm-{method}", daemon=True
        ).start()
        while not wait([answer], LOOK_SECONDS).done:
            dead = [process for process in self._processes if not process.is_alive()]
            if dead and not wait([answer], LAST_WORDS_SECONDS).done:
                deaths = ", ".join(
                    f"{process.name} (process {process.pid}, exit code {process.exitcode})"
                    for process in dead
                )
                raise RuntimeError(f"vLLM died in {method}(): {deaths}.{note_of_full_memory()}")
        return answer.result()

    def _answer(
        self, answer: Future[Any], method: str, args: Sequence[object], kwargs: Mapping[str, object]
    ) -> None:
        try:
            answer.set_result(attrgetter(method)(self._llm)(*args, **kwargs))
        except BaseException as error:
            # An error raised in this thread would be lost, so store it in the future.
            answer.set_exception(error)

    def _end_processes(self) -> None:
        try:
            self._llm.llm_engine.engine_core.shutdown()
        except psutil.NoSuchProcess:
            # vLLM ends its processes one after another, and fails if one has just exited. Kill the others.
            for process in self._processes:
                process.kill()

    def shutdown(self) -> None:
        """End vLLM's processes, including those that are left of an engine that died."""
        # Each step runs even if an earlier one raises: weight-transfer engine, then processes, then sockets.
        with contextlib.ExitStack() as ending:
            ending.callback(self._sockets.cleanup)
            ending.callback(self._end_processes)
            if not self._processes:
                self.call("shutdown_weight_transfer_engine")
            elif self.is_alive:
                try:
                    self.call("shutdown_weight_transfer_engine")
                except Exception:
                    # Ignore the error if the engine is dying: its last call has already raised one.
                    if not connection.wait(
                        [process.sentinel for process in self._processes], LAST_WORDS_SECONDS
                    ):
                        raise


class VllmGenerationWorker:
    """An engine with tensor- and pipeline-parallel ranks; or one node's part of an engine, which ``join``
    starts.

    Args:
        config: the generation configuration, with all values present.
        seed: seed of vLLM itself. Responses depend on the rows' own seeds.
        tokenizer: directory or hub id; defaults to the model's.
        nodes: number of nodes of the engine; all have the same number of ranks.
        adapter: rank and scale of the policy's adapter, if refits send only its factors.
        place: index of the engine's first bundle, and the fraction of its GPU that the engine has (0 without
            GPUs).
    """

    def __init__(
        self,
        config: GenerationConfig,
        seed: int = 0,
        tokenizer: str | None = None,
        nodes: int = 1,
        adapter: AdapterScale | None = None,
        place: tuple[int, float] | None = None,
    ) -> None:
        self._adapter = adapter
        self._config, self._seed, self._tokenizer, self._nodes = config, seed, tokenizer, nodes
        self._engine: Engine
        self._follower: Follower | None = None
        self._names: list[str] = []
        self._version: int | None = None
        self._updating = False
        self._ticket: int | None = None
        ranks = ranks_of(config["vllm_cfg"]) // nodes
        if place is not None and place[1]:
            # Set this before torch looks for devices. It is needed for one rank too: if Ray is configured not
            # to set the variable, all engines would use the first GPU.
            env.set_variables(
                {"CUDA_VISIBLE_DEVICES": ",".join(devices_of_places(place[0], ranks, place[1]))}
            )
        self._on_cpu = on_cpu = not runtime().is_cuda
        if ranks > 1 and not on_cpu and place is None:
            raise ConfigError(
                f"an engine of {ranks} ranks on GPUs has no bundles: start its workers with "
                "bundle_indices_list"
            )
        for key, reason in ONLY_ON_GPUS.items() if on_cpu else ():
            size = at(config, f"vllm_cfg.{key}")
            if size > 1:
                raise ConfigError(
                    f"policy.generation.vllm_cfg.{key} = {size}: {reason}. Fix: write 1, or run on GPUs"
                )
        plugin.require_entry_point()
        # Register here for an engine in this process. vLLM's own processes call the entry point.
        plugin.register()
        if on_cpu:
            _check_model_on_a_cpu(config["model_name"])
            _check_runner_on_a_cpu()
        if nodes == 1:
            options = engine_options(config, seed, tokenizer, on_cpu=on_cpu, adapter=adapter)
            module, _, name = plugin.EXECUTOR.rpartition(".")
            if options.get("distributed_executor_backend") == plugin.EXECUTOR:
                # Pass the class, not its name. The class declares support for pipeline parallelism; for a
                # name, vLLM assumes that it is not supported.
                options["distributed_executor_backend"] = getattr(importlib.import_module(module), name)
            self._engine = Engine(options)

    @staticmethod
    def configure_worker(
        num_gpus: float, bundle_indices: tuple[int, list[int]] | None
    ) -> tuple[dict[str, Any], dict[str, str], dict[str, Any]]:
        """Return the arguments that tell a worker its bundle; see ``RayWorkerBuilder``."""
        return {}, {}, {"place": (bundle_indices[1][0], num_gpus) if bundle_indices else None}

    def meeting_place(self) -> tuple[str, int]:
        """Return this node's address and a free port, for the ranks of an engine that spans several nodes to
        connect to."""
        address = ray.util.get_node_ip_address()
        return address, free_port(address)

    def join(self, node: int, address: list[Any]) -> None:
        """Start this node's part of an engine. All parts must be started together; each returns when all
        ranks have connected.

        Args:
            node: index of the part; the first part returns the engine's results.
            address: result of the first part's ``meeting_place``.
        """
        # The other nodes reach this node at this address.
        env.set_variables({"VLLM_HOST_IP": ray.util.get_node_ip_address()})
        part = Part(node, self._nodes, *address)
        options = engine_options(
            self._config, self._seed, self._tokenizer, on_cpu=self._on_cpu, part=part, adapter=self._adapter
        )
        if node:
            self._follower = Follower(options)
            return
        self._engine = Engine(options)
        # An engine on one node does this in its ``Executor``.
        self._engine.call("collective_rpc", "megarl_remove_names")

    # Methods for a refit.

    def connect(self, weights: list[list[Any]], address: list[Any] | None) -> None:
        """Give vLLM's ranks the description of the weights and, for a broadcast, the address of the transfer
        group."""
        self._names = [name for name, _, _ in weights]
        self._version = None
        self._call(
            "init_weight_transfer_engine",
            init_info={"weights": weights, "address": address, "adapter": self._adapter},
        )

    def meet(self, mailboxes: Mapping[str, MailboxHandle], session: int) -> None:
        """Let each of vLLM's ranks open the mailbox of the policy rank on its device."""
        self._call("megarl_meet", mailboxes=mailboxes, session=session)

    def slices_read(self, as_digest: bool = False) -> list[tuple[str, Slices | str]]:
        """Return, for each of vLLM's ranks, the id of its device and the slices of the weights that it reads,
        or their ``slices_digest``."""
        found: list[tuple[str, Slices | str]] = []
        for device, plain in self._engine.call("collective_rpc", "megarl_slices_read"):
            slices = {name: Slice(*where) for name, where in plain.items()}
            found.append((device, slices_digest(slices) if as_digest else slices))
        return found

    def take_slices(self, names: list[str]) -> None:
        """Make all of vLLM's ranks expect slices of the weights ``names`` in later refits."""
        self._version = None
        self._call("megarl_take_slices", names=names)

    def update_from_policy(self, ticket: int) -> int | None:
        """Load all weights of a refit, which policy ranks send to vLLM's ranks directly. Return the version
        of the weights.

        Raises:
            RefitError: not all weights have arrived.
        """
        self._begin(ticket)
        self._update({"ticket": ticket})
        self._finish()
        return self._version

    def update_from_handles(self, handles: dict[str, CarriedPayload]) -> int | None:
        """Load one group of weights. Return their version after the last group, otherwise None."""
        payload = next(iter(handles.values()))
        # The first group begins a reload, and aborts one that was interrupted.
        if payload["first"] == 0:
            self._begin()
        self._update({"handles": handles})
        if payload["first"] + payload["count"] == len(self._names):
            self._finish()
        return self._version

    def update_from_broadcast(self, version: int | None = None) -> int | None:
        """Load all weights from the transfer group. Return their version, which the policy sends.

        Args:
            version: required version; None accepts any.

        Raises:
            RefitError: not all weights have arrived, or they have another version.
        """
        self._begin()
        self._update({})
        self._finish()
        if version is not None and version != self._version:
            came, self._version = self._version, None
            raise RefitError(
                f"the policy sent version {came} of its weights, but version {version} was "
                "requested: refit again"
            )
        return self._version

    def _begin(self, ticket: int | None = None) -> None:
        self._give_up()
        self._updating, self._ticket = True, ticket
        self._call("start_weight_update")

    def _update(self, update: Mapping[str, object]) -> None:
        self._call("update_weights", update_info=update)

    def _finish(self) -> None:
        self._call("finish_weight_update")
        self._updating = False
        if self._adapter is not None:
            self._call("megarl_bind_adapter")
        # Compare all ranks, because vLLM itself would accept ranks with different versions.
        versions = set(self._engine.call("collective_rpc", "megarl_weights_version"))
        if len(versions) != 1:
            raise RefitError(
                f"the ranks of the engine hold versions {sorted(map(str, versions))} of the "
                "weights: refit again"
            )
        # The KV cache of earlier prompts was computed with the old weights.
        if not self._engine.call("reset_prefix_cache"):
            raise RefitError(
                "vLLM keeps keys and values of the older weights, for a prompt that it still completes: "
                "refit again when it is done"
            )
        [self._version] = versions

    def _call(self, method: str, **arguments: Any) -> None:
        """Run a weight-transfer method of vLLM on all ranks. After an error the refit is aborted on all of
        them.

        Raises:
            RefitError: ranks failed with megarl's own errors only.
            RuntimeError: a rank failed with another error, and may be unusable.
        """
        # megarl_call returns errors instead of raising them, because vLLM reads only one rank's error.
        answers = self._engine.call("collective_rpc", "megarl_call", args=(method, arguments))
        failures = {rank: Failure(*answer) for rank, answer in enumerate(answers) if answer is not None}
        if failures:
            self._give_up()
            raise _error_of(failures, len(answers))

    def _give_up(self) -> None:
        """Abort the refit that is in progress on any rank, if there is one."""
        self._version = None
        if self._updating:
            self._updating = False
            # Ignore the errors of ranks that have no refit in progress.
            with contextlib.suppress(Exception):
                self._engine.call(
                    "collective_rpc",
                    "megarl_call",
                    args=("update_weights", {"update_info": {"given_up": True}}),
                )
            if self._ticket is not None:
                # Tell the policy ranks for all engine ranks: one that had not started the refit would not do
                # so itself.
                with contextlib.suppress(Exception):
                    self._engine.call(
                        "collective_rpc", "megarl_call", args=("megarl_refuse", {"ticket": self._ticket})
                    )

    # Methods that generate.

    def generate(
        self, data: BatchedDataDict[Any], greedy: bool, version: int | None, sampling: Sampling | None = None
    ) -> BatchedDataDict[Any]:
        """Generate a response to every prompt with the weights of ``version``.

        Raises:
            RefitError: the engine has another version of the weights, or no complete weights.
        """
        self._require(version)
        from vllm import SamplingParams

        config = cast(GenerationConfig, {**self._config, **(sampling or {})})
        requests = requests_of(data, config, self._config["vllm_cfg"]["max_model_len"], greedy=greedy)
        # Pass token ids: vLLM would tokenize text again, perhaps with another result.
        prompts = [{"prompt_token_ids": request.prompt} for request in requests]
        params = [SamplingParams(**request.options) for request in requests]
        seed = None if greedy else seed_of_call(data, self._config)
        outputs = (
            self._engine.call("generate", prompts, params, use_tqdm=False, **self._beside())
            if seed is None
            else self._drawn(prompts, params, seed)
        )
        answers = {
            request.row: answer_of(output.outputs[0])
            for request, output in zip(requests, outputs, strict=True)
        }
        return assembled(data, answers, int(self._config["pad_token_id"]))

    def score(self, data: BatchedDataDict[Any], version: int | None) -> BatchedDataDict[Any]:
        """Return ``logprobs`` [B, S] float32 of the tokens of ``data``, each given the tokens before it; 0
        for the first token and on padding.

        A row must leave room for one more token. vLLM does not use its prefix cache for prompts that are
        scored.

        Raises:
            RefitError: the engine has another version of the weights, or no complete weights.
        """
        self._require(version)
        from vllm import SamplingParams

        prompts = []
        for ids, length in zip(data["input_ids"], data["input_lengths"].tolist(), strict=True):
            prompts.append({"prompt_token_ids": ids[:length].tolist()})
        # vLLM scores a prompt only when it responds, so that one token is sampled and dropped.
        params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False)
        outputs = self._engine.call("generate", prompts, params, use_tqdm=False, **self._beside())
        logprobs = torch.zeros(data["input_ids"].shape)
        for row, output in enumerate(outputs):
            for place, (token, found) in enumerate(
                zip(output.prompt_token_ids, output.prompt_logprobs, strict=True)
            ):
                logprobs[row, place] = 0.0 if found is None else found[token].logprob
        return BatchedDataDict({"logprobs": logprobs})

    def _beside(self) -> dict[str, object]:
        """Return the argument of vLLM's requests that selects the policy's adapter; empty without an
        adapter."""
        if self._adapter is None:
            return {}
        from vllm.lora.request import LoRARequest

        from megarl.models.generation.vllm.adapter_binding import ADAPTER

        # vLLM already has the adapter with this id from the refit, so it does not read the path.
        return {"lora_request": LoRARequest("policy", ADAPTER, "sent by refits")}

    def _require(self, version: int | None) -> None:
        if self._version is None or self._version != version:
            raise RefitError(
                f"the engine has the weights of version {self._version}, but version {version} is "
                "required; refit it before it generates"
            )

    def exchange(
        self,
        numbers: list[int],
        data: BatchedDataDict[Any] | None,
        given_up: list[int],
        wait_s: float,
        *,
        greedy: bool,
        version: int | None,
        sampling: Sampling | None,
        gathers: bool = False,
    ) -> list[tuple[int, Sequence[int], Sequence[float], bool]]:
        """Add requests, and run the engine until a request is completed.

        Args:
            numbers: the caller's number of each row of ``data``.
            data: prompts, as in ``generate``.
            given_up: numbers of requests to interrupt.
            wait_s: maximum seconds to run the engine.
            greedy, version, sampling: see ``generate``.
            gathers: run the engine for the full ``wait_s``, even if requests are completed earlier.

        Returns:
            (number, tokens, log-probabilities, truncated) of each request that was completed or interrupted.

        Raises:
            RefitError: the engine has another version of the weights, or no complete weights.
        """
        self._require(version)
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        found = self._given_up(set(map(str, given_up)))
        if data is not None:
            config = cast(GenerationConfig, {**self._config, **(sampling or {})})
            requests = requests_of(data, config, self._config["vllm_cfg"]["max_model_len"], greedy=greedy)
            # vLLM rejects prompts without room for a token, so return their empty responses here.
            found |= dict.fromkeys(set(numbers) - {numbers[request.row] for request in requests}, NO_ROOM)
            for request in requests:
                params = SamplingParams(**request.options, output_kind=RequestOutputKind.FINAL_ONLY)
                prompt = {"prompt_token_ids": request.prompt}
                self._engine.call(
                    "llm_engine.add_request", str(numbers[request.row]), prompt, params, **self._beside()
                )
        until = time.monotonic() + wait_s
        while (
            (gathers or not found)
            and self._engine.call("llm_engine.has_unfinished_requests")
            and time.monotonic() < until
        ):
            for output in self._engine.call("llm_engine.step"):
                if output.finished:
                    found[int(output.request_id)] = answer_of(output.outputs[0])
        return [
            (number, answer.tokens, answer.logprobs, answer.truncated) for number, answer in found.items()
        ]

    def _given_up(self, names: set[str]) -> dict[int, Answer]:
        """Interrupt requests, and return their partial responses."""
        if not names:
            return {}
        from vllm.v1.engine import FinishReason

        # Build the outputs here: vLLM returns the output of an aborted request only to callers in its own
        # event loop.
        states = list(self._engine.call("llm_engine.output_processor.request_states.values"))
        outputs = [
            state.make_request_output([], None, FinishReason.ABORT, None)
            for state in states
            if state.external_req_id in names
        ]
        self._engine.call("llm_engine.abort_request", sorted(names))
        return {int(output.request_id): answer_of(output.outputs[0]) for output in outputs}

    def _drawn(self, prompts: list[Any], params: list[Any], seed: int) -> Any:
        """Generate with one seed for all prompts.

        The scheduler is stopped until all prompts are queued. Otherwise a prompt's random numbers would
        depend on the times at which the prompts arrive.
        """
        # Level 0 only pauses the scheduler, and keeps weights and KV cache.
        self._engine.call("sleep", level=0)
        try:
            self._engine.call("collective_rpc", "megarl_seed", args=(seed,))
            self._engine.call("enqueue", prompts, params, use_tqdm=False, **self._beside())
        finally:
            self._engine.call("wake_up", ["scheduling"])
        return self._engine.call("wait_for_completion", use_tqdm=False)

    def prepare_for_generation(self, tags: list[str] | None = None) -> None:
        """Allocate device memory again: ``weights``, ``kv_cache``, or both if ``tags`` is None."""
        if self._engine.has_sleep_mode:
            self._engine.call("wake_up", tags)

    def finish_generation(self) -> bool:
        """Free the engine's device memory if it shares the device. Return whether the weights were kept; if
        not, a refit must follow."""
        self._engine.call("reset_prefix_cache")
        if self._engine.has_sleep_mode:
            self._version = None
            # Level 2 discards the weights. Level 1 would copy them to host memory, but the next refit sends
            # new ones anyway.
            self._engine.call("sleep", level=2)
            return False
        return True

    def environment(self) -> dict[str, str]:
        """Return this process's environment variables whose names start with ``VLLM_``."""
        return {name: value for name, value in env.snapshot().items() if name.startswith("VLLM_")}

    def is_alive(self) -> bool:
        """Return whether all of vLLM's processes are running. If this worker itself is dead, the call fails
        instead."""
        return (self._follower or self._engine).is_alive

    def shutdown(self) -> None:
        """End vLLM's processes."""
        if self._follower is not None:
            self._follower.shutdown()
            return
        self._give_up()
        self._engine.shutdown()


def _error_of(failures: Mapping[int, Failure], ranks: int) -> RuntimeError:
    """Combine the failures of ranks that could not load weights into one error."""
    messages, traces = [], []
    for rank, failure in failures.items():
        messages.append(f"rank {rank} of {ranks}: {failure.message}" if ranks > 1 else failure.message)
        traces.append(f"--- in vLLM's rank {rank} ---\n{failure.trace}")
    message = "\n".join([f"the engine did not take the weights: {'; '.join(messages)}", *traces])
    return (
        RefitError(message)
        if all(failure.on_purpose for failure in failures.values())
        else RuntimeError(message)
    )


def _check_model_on_a_cpu(model: str) -> None:
    """Check that vLLM can run a model on a CPU. vLLM's own error would come only after a minute.

    Raises:
        ConfigError: there is no CPU kernel for the model's head width, or vLLM's code of the model cannot be
            imported.
    """
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    from converters.families.hf_config import read_hf_config

    config = read_hf_config(model).get_text_config()
    if config.model_type.startswith("qwen3_5"):
        _check_torchvision(model)
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    widths = CPUAttentionBackend.get_supported_head_sizes()
    if width not in widths:
        raise ConfigError(
            f"policy.model_name = {model!r}: its attention heads are {width} wide; vLLM on a CPU has "
            f"kernels for {widths}. "
            "Fix: take another model, or remove policy.generation.backend: then the policy itself generates"
        )


def _check_torchvision(model: str) -> None:
    """Check that torchvision, which vLLM's code of this model imports, can be imported.

    Raises:
        ConfigError: torchvision is absent, or was built for another torch.
    """
    try:
        importlib.import_module("torchvision")
    except Exception as error:
        raise ConfigError(
            f"policy.model_name = {model!r}: vLLM's Qwen3.5 imports torchvision, which fails here "
            f"({type(error).__name__}: {error}). Fix: install a torchvision that is built for this torch "
            f"({torch.__version__}), or remove policy.generation.backend: then the policy itself generates"
        ) from error


def _check_runner_on_a_cpu() -> None:
    """Check that vLLM's V2 model runner, if selected, can run. vLLM's own error gives no advice ("Model
    Runner V2 requires Triton.").

    Raises:
        ConfigError: the runner is selected, but Triton, whose kernels prepare its batches, is not available.
    """
    from vllm import envs
    from vllm.triton_utils import HAS_TRITON

    if envs.VLLM_USE_V2_MODEL_RUNNER and not HAS_TRITON:
        raise ConfigError(
            "VLLM_USE_V2_MODEL_RUNNER = 1: vLLM's newer model runner needs Triton, on a CPU one with a "
            "backend for CPUs, which is not "
            "installed. Fix: remove the variable from policy.generation.vllm_cfg.env_vars and from the "
            "environment; the older runner then "
            "does the same on a CPU"
        )
