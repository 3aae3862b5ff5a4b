"""Modules that the pool's server imports once, before it forks workers, because they are slow to import."""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import os
import warnings

from megarl import env

# before torch and its numerical libraries look at them: one thread a worker, and no device but the CPU
env.set_variables(
    {
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "MEGARL_DEVICE": "cpu",
        "TOKENIZERS_PARALLELISM": "false",
    }
)
# the newest Megatron-Core imports Triton, which decides at its import whether it interprets
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
    # what cannot be imported fails again, with its traceback, where it is used
    with contextlib.suppress(Exception):
        importlib.import_module(_module)

# Triton, where it is installed, lists its own leaks on the console when a process that imported it ends; the
# server ends when the command has ended and its answer stands there. Workers never come here.
atexit.register(os._exit, 0)

# workers collect garbage after every job; what was imported is none, and need not be looked through
gc.freeze()
