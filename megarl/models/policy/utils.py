"""Functions that code written for NeMo-RL's policy layer imports from this module. megarl does not use
them."""

from __future__ import annotations

import importlib
import logging
from pathlib import Path
from typing import Any

import torch

from megarl import env
from megarl.distributed.allocator import AllocatorOptions
from megarl.distributed.device import runtime
from megarl.distributed.worker_group_utils import get_nsight_config_if_pattern_matches
from megarl.errors import ConfigError, Violation

__all__ = [
    "configure_expandable_segments",
    "get_gpu_info",
    "get_megatron_checkpoint_dir",
    "get_runtime_env_for_policy_worker",
    "import_class_from_path",
    "is_vllm_v1_engine_enabled",
    "sliding_window_overwrite",
]

logger = logging.getLogger(__name__)

# Major compute capability of Hopper GPUs.
_HOPPER = 9


def is_vllm_v1_engine_enabled() -> bool:
    """Return True: the supported vLLM versions have only the V1 engine."""
    return True


def import_class_from_path(name: str) -> Any:
    """Import and return the object at ``package.module.Name``.

    Raises:
        ConfigError: (a ValueError) nothing can be imported under this name.
    """
    module, _, attribute = name.rpartition(".")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        bound = f"nothing can be imported under this name ({error})"
        raise ConfigError([Violation("import path", name, bound, "write package.module.Name")]) from error


def get_gpu_info(model: torch.nn.Module) -> dict[str, Any]:
    """Return rank, device and memory statistics (MiB) of this process, and one parameter of ``model`` as a
    sample. torch.distributed must be initialized."""
    return runtime().facts(model.named_parameters())


def sliding_window_overwrite(model_name: str) -> dict[str, Any]:
    """Return overrides of a model's config that stop an engine from using a disabled sliding window.

    Some configs set ``sliding_window`` although ``use_sliding_window`` is false.

    Args:
        model_name: directory or Hugging Face id of the model.

    Returns:
        ``{"sliding_window": None}`` for such a config, otherwise an empty dictionary.
    """
    from converters.families.hf_config import read_hf_config

    config = read_hf_config(model_name)
    switched_off = getattr(config, "use_sliding_window", True) is False
    return (
        {"sliding_window": None}
        if switched_off and getattr(config, "sliding_window", None) is not None
        else {}
    )


def configure_expandable_segments() -> None:
    """Enable expandable segments of torch's CUDA allocator (``PYTORCH_CUDA_ALLOC_CONF``) on Hopper or newer
    GPUs.

    Call this before the first CUDA allocation. A value that the environment already sets is kept. Without a
    CUDA device this does nothing.

    Raises:
        RuntimeError: the environment enables expandable segments on an older GPU, where weights could then
            not be passed to an engine.
    """
    if not runtime().is_cuda:
        return
    options = AllocatorOptions.of_environment()
    if torch.cuda.get_device_capability(runtime().device)[0] >= _HOPPER:
        # torch reads the variable at the first CUDA allocation, so setting it in this process is early
        # enough.
        if options.expandable is None:
            env.set_variables(options.with_expandable(True).as_environment())
    elif options.expandable:
        raise RuntimeError(
            f"{options.variable} = {str(options)!r}: expandable_segments needs a Hopper device or "
            f"a later one (compute capability {_HOPPER}.0). Fix: remove it"
        )


def get_runtime_env_for_policy_worker(policy_worker_name: str) -> dict[str, Any]:
    """Return Ray's runtime environment for a policy worker. It starts Nsight Systems if
    ``MEGARL_NSYS_WORKER_PATTERNS`` matches the worker's name.

    Args:
        policy_worker_name: for example ``megatron_policy_worker``.
    """
    return get_nsight_config_if_pattern_matches(policy_worker_name)


def get_megatron_checkpoint_dir() -> str:
    """Return and log the directory for converted checkpoints.

    It is ``MEGARL_MEGATRON_CHECKPOINT_DIR``, else ``megarl`` in ``HF_HOME``, else
    ``~/.cache/huggingface/megarl``; a blank variable counts as unset. megarl's workers read Hugging Face
    models directly and write nothing there.
    """
    chosen = env.text("MEGARL_MEGATRON_CHECKPOINT_DIR")
    if chosen is None:
        home = env.text("HF_HOME")
        chosen = str((Path(home) if home else Path.home() / ".cache" / "huggingface") / "megarl")
    logger.info("converted checkpoints are kept in %s", chosen)
    return chosen
