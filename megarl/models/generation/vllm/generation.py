"""``VllmGeneration``: vLLM engines on the bundles of a cluster."""

from __future__ import annotations

import functools
import itertools

import numpy as np

from converters.checkpoint.source import open_source
from megarl import env
from megarl.config.generation import GenerationConfig
from megarl.config.policy import PeftConfig
from megarl.distributed.deadlines import PhaseDeadlines
from megarl.distributed.named_sharding import NamedSharding
from megarl.distributed.virtual_cluster import RayVirtualCluster
from megarl.distributed.worker_groups import RayWorkerBuilder, RayWorkerGroup
from megarl.models.generation.engine_group import NODE, EngineGroup, EngineWorkers, engine_places
from megarl.models.generation.vllm.options import AdapterScale, completed, ranks_of

WORKER = "megarl.models.generation.vllm.worker.VllmGenerationWorker"
_SETTINGS = "policy.generation.vllm_cfg"
LONGEST = f"{_SETTINGS}.max_model_len"


class VllmGeneration(EngineGroup):
    """A group of vLLM engines on the bundles of a cluster.

    Args:
        cluster: provides the bundles. An engine takes adjacent bundles, one per rank.
        config: the generation configuration, after ``configure_generation_config``; optional keys may be
            absent.
        name_prefix: prefix of the workers' names.
        workers_per_node: ignored; part of NeMo-RL's policy API.
        model: directory or hub id of the model; defaults to ``config["model_name"]``.
        longest: maximum number of tokens of prompt and response together; defaults to
            ``vllm_cfg.max_model_len``.
        dtype: dtype of the weights, ``float32``, ``bfloat16`` or ``float16``; defaults to
            ``vllm_cfg.precision``.
        tokenizer: directory or hub id of the tokenizer that decodes responses for stop strings; defaults to
            the model's.
        adapter: the ``policy.peft`` section of a policy whose refits send only its adapter.
        seed: gives the sampling seeds of batches without ``sampling_seeds``, and vLLM's own seed.
        init_timeout_s: time limit in seconds for starting the engines.
        call_timeout_s: time limit in seconds of each call.
        deadlines: time limits per phase, used instead of ``call_timeout_s``.

    Raises:
        ConfigError: the configuration lacks a value, or the bundles cannot be divided into engines.
        MegarlError: an engine could not be started; those already started are shut down.
    """

    def __init__(
        self,
        cluster: RayVirtualCluster,
        config: GenerationConfig,
        name_prefix: str = "vllm_policy",
        workers_per_node: int | list[int] | None = None,
        *,
        model: str | None = None,
        longest: int | None = None,
        dtype: str | None = None,
        tokenizer: str | None = None,
        adapter: PeftConfig | None = None,
        seed: int = 0,
        init_timeout_s: float = 900.0,
        call_timeout_s: float = 3600.0,
        deadlines: PhaseDeadlines | None = None,
    ) -> None:
        config = completed(config, model, longest, dtype)
        settings = config["vllm_cfg"]
        ranks = ranks_of(settings)
        on_cpu = not cluster.use_gpus
        scale: AdapterScale | None = None
        if adapter is not None:
            scale = {
                "rank": adapter["dim"],
                "alpha": adapter["alpha"],
                "rank_stabilized": adapter["use_rslora"],
            }
        places = engine_places(cluster, ranks, _SETTINGS)
        make = functools.partial(
            RayWorkerGroup,
            cluster,
            RayWorkerBuilder(WORKER, dict(config), seed, tokenizer, len(places[0]), scale),
            name_prefix=name_prefix,
            # Give each node of an engine one worker; its other bundles are for vLLM's ranks.
            bundle_indices_list=list(itertools.chain.from_iterable(places)),
            sharding_annotations=NamedSharding(
                np.arange(len(places) * len(places[0])).reshape(len(places), -1), ["data_parallel", NODE]
            ),
            env_vars={
                "MEGARL_DEVICE": "cpu" if on_cpu else "cuda",
                # vLLM would log a warning for every module without weights in each refit.
                "VLLM_LOGGING_LEVEL": env.text("VLLM_LOGGING_LEVEL") or "ERROR",
                # An engine of one rank runs in the worker itself. This saves a process, and the engine cannot
                # outlive the worker.
                **({"VLLM_ENABLE_V1_MULTIPROCESSING": "0"} if on_cpu and ranks == 1 else {}),
                # If vLLM bound threads to NUMA nodes, an engine could not have more ranks than the machine
                # has NUMA nodes.
                **({"VLLM_CPU_OMP_THREADS_BIND": "nobind"} if on_cpu and ranks > 1 else {}),
                **{str(key): str(value) for key, value in (settings["env_vars"] or {}).items()},
            },
            init_timeout_s=init_timeout_s,
            call_timeout_s=call_timeout_s,
            deadlines=deadlines,
        )
        facts = open_source(config["model_name"]).read_json("config.json") or {}
        super().__init__(
            EngineWorkers(make, len(places), ranks, len(places[0]), init_timeout_s),
            config,
            vocab_size=int((facts.get("text_config") or facts)["vocab_size"]),
            longest=int(settings["max_model_len"]),
            longest_key=LONGEST,
            seed=seed,
        )

    @property
    def scores(self) -> bool:
        """True: vLLM's workers have the method ``score``."""
        return True

    @property
    def takes_requests(self) -> bool:
        """True unless ``fast_sampling`` is set: the random numbers of a request would depend on the other
        waiting requests."""
        return not self.cfg["vllm_cfg"]["fast_sampling"]
