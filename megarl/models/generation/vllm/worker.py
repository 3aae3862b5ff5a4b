"""One vLLM engine in a process of its own, with the version of the weights that it has."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

from megarl.distributed.batched_data_dict import BatchedDataDict
from megarl.distributed.device import runtime
from megarl.errors import RefitError
from megarl.models.generation.vllm import plugin
from megarl.models.generation.vllm.requests import answer_of, assembled, requests_of

GIB = 2**30


class VllmGenerationWorker:
    """An engine, with as many ranks as its tensor parallelism.

    Args:
        config: the generation configuration, with ``vllm_cfg``.
        model: Hugging Face directory or hub id, for the architecture and the tokenizer.
        longest: most tokens of prompt and answer together.
        dtype: of the weights.
        seed: of vLLM itself; answers depend on the seeds of their rows.
    """

    def __init__(self, config: Mapping[str, Any], model: str, longest: int, dtype: str, seed: int = 0) -> None:
        self._config = config
        self._longest = longest
        self._names: list[str] = []
        self._version: int | None = None
        self._updating = False
        settings = config["vllm_cfg"]
        on_cpu = not runtime().is_cuda
        from vllm import LLM

        plugin.register()
        options: dict[str, Any] = {
            "model": model,
            "tensor_parallel_size": settings["tensor_parallel_size"],
            "dtype": dtype,
            "seed": seed,
            "load_format": settings["load_format"],
            "max_model_len": longest,
            "enforce_eager": settings["enforce_eager"],
            "gpu_memory_utilization": settings["gpu_memory_utilization"],
            "enable_sleep_mode": not on_cpu and config["colocated"]["enabled"],
            # a prefix that was computed with other weights must not be used
            "enable_prefix_caching": False,
            # after the temperature, as the policy's are
            "logprobs_mode": "processed_logprobs",
            "weight_transfer_config": {"backend": plugin.COLOCATED if config["colocated"]["enabled"] else plugin.APART},
            "trust_remote_code": False,
            "disable_log_stats": True,
        }
        if settings["kv_cache_gb"] is not None:
            options["kv_cache_memory_bytes"] = int(settings["kv_cache_gb"] * GIB)
        if on_cpu:
            options["block_size"] = 32
        self._llm = LLM(**{**options, **(config.get("vllm_kwargs") or {})})

    # refit

    def connect(self, weights: list[list[Any]], address: list[Any] | None) -> None:
        """Tell vLLM's ranks what will come, and where from."""
        self._names = [name for name, _, _ in weights]
        self._version = None
        self._llm.init_weight_transfer_engine({"init_info": {"weights": weights, "address": address}})

    def update_from_handles(self, handles: dict[str, Any]) -> int | None:
        """Load one group of weights. Returns the version when it was the last."""
        payload = next(iter(handles.values()))
        if payload["first"] == 0:
            self._begin()
        self._update({"handles": handles})
        if payload["first"] + payload["count"] == len(self._names):
            self._finish(int(payload["version"]))
        return self._version

    def update_from_broadcast(self, version: int) -> int | None:
        """Load all weights of a version from the transfer group."""
        self._begin()
        self._update({})
        self._finish(version)
        return self._version

    def _begin(self) -> None:
        self._give_up()
        self._llm.start_weight_update()
        self._updating = True

    def _update(self, update: dict[str, Any]) -> None:
        try:
            self._llm.update_weights({"update_info": update})
        except BaseException:
            self._version, self._updating = None, False
            raise

    def _finish(self, version: int) -> None:
        self._llm.finish_weight_update()
        self._version, self._updating = version, False

    def _give_up(self) -> None:
        """End a refit that is under way, if there is one."""
        self._version = None
        if self._updating:
            with contextlib.suppress(Exception):
                self._update({"given_up": True})

    # generation

    def generate(self, data: BatchedDataDict[Any], greedy: bool, version: int | None) -> BatchedDataDict[Any]:
        """Complete every prompt with the weights of ``version``.

        Raises:
            RefitError: the engine has others, or none that are whole.
        """
        if self._version is None or self._version != version:
            raise RefitError(
                f"the engine has the weights of version {self._version} where version {version} is wanted; refit it before it answers"
            )
        from vllm import SamplingParams

        requests = requests_of(data, self._config, self._longest, greedy=greedy)
        outputs = self._llm.generate(
            [{"prompt_token_ids": request.prompt} for request in requests],
            [SamplingParams(**request.options) for request in requests],
            use_tqdm=False,
        )
        answers = {request.row: answer_of(output.outputs[0]) for request, output in zip(requests, outputs, strict=True)}
        return assembled(data, answers, int(self._config["pad_token_id"]))

    def prepare_for_generation(self, tags: list[str] | None = None) -> None:
        """Take memory again: ``weights``, ``kv_cache``, or both."""
        if self._llm.llm_engine.vllm_config.model_config.enable_sleep_mode:
            self._llm.wake_up(tags)

    def finish_generation(self) -> None:
        """Give memory back, where the device is shared. The weights go: only a refit brings them back."""
        self._llm.reset_prefix_cache()
        if self._llm.llm_engine.vllm_config.model_config.enable_sleep_mode:
            self._version = None
            self._llm.sleep(level=2)

    def is_alive(self) -> bool:
        """True, from any worker that still answers."""
        return True

    def shutdown(self) -> None:
        """End vLLM's processes."""
        self._give_up()
        self._llm.shutdown_weight_transfer_engine()
        engine = self._llm.llm_engine.engine_core
        engine.shutdown()
