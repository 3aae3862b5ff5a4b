"""Slow imports that the pool's server makes once, before it forks workers."""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import os
import warnings

from megarl import env

# These variables must be set before torch and its numerical libraries read them: one thread per worker, and
# no GPU.
env.set_variables(
    {
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "MEGARL_DEVICE": "cpu",
        "TOKENIZERS_PARALLELISM": "false",
    }
)
# The newest Megatron-Core imports Triton, which decides at import time whether it interprets kernels.
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
    # Where the module is needed, its import fails again and shows the traceback.
    with contextlib.suppress(Exception):
        importlib.import_module(_module)

# At exit, Triton (if installed) lists its own leaks on the console. The server exits after the command has
# printed its results, so skip all exit handlers. Workers run none.
atexit.register(os._exit, 0)

# Workers collect garbage after every job. Exclude all imported objects, which live until the end, from these
# searches.
gc.freeze()
