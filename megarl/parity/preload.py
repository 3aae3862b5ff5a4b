"""Modules that the pool's server imports once, before it forks workers, because they are slow to import."""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import os
import warnings

from megarl import env

# Set these variables before torch and its numerical libraries read them: one thread per worker, and no device
# but the CPU.
env.set_variables(
    {
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "MEGARL_DEVICE": "cpu",
        "TOKENIZERS_PARALLELISM": "false",
    }
)
# The newest Megatron-Core imports Triton, which decides at its import whether it interprets kernels.
env.set_variables({"TRITON_INTERPRET": "1"})

MODULES = (
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "transformers.models.llama.modeling_llama",
    "megarl.models.policy.megatron_policy_worker",
    "megarl.models.policy.dtensor_policy_worker",
    "megarl.models.policy.fsdp1_policy_worker",
    "megarl.parity.jobs",
)

warnings.filterwarnings("ignore")
for _module in MODULES:
    # A module that cannot be imported fails again, with its traceback, where it is used.
    with contextlib.suppress(Exception):
        importlib.import_module(_module)

# Triton, if it is installed, lists its own leaks on the console when a process that imported it ends. The
# fork server ends after the command has printed its results, so end it without Triton's exit handler. Workers
# do not run exit handlers.
atexit.register(os._exit, 0)

# Workers collect garbage after every job. What was imported is not garbage, and need not be searched.
gc.freeze()
