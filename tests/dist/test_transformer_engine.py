"""Transformer Engine that works on some ranks only: a package stands for it, and a GPU is pretended. All
ranks build the same layers."""

from __future__ import annotations

import importlib
import logging
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import layers
from torch import Tensor

from megarl.algorithms.loss_functions import NLLLoss
from megarl.config.arithmetic import padded_vocabulary
from megarl.errors import ConfigError
from megarl.models.megatron import build, optimizer, specs, transformer_engine
from megarl.parity.pool import WorkerPool
from megarl.patched import patched
from tests.dist import jobs
from tests.dist.batches import make_batch
from tests.models import policy_config
from tests.tiers import newest_megatron
from tests.unit.test_transformer_engine import LINKER, WORKS, write_package

RANKS = 4
REASON = "it cannot be imported (OSError: libtransformer_engine.so: undefined symbol: _ZN3c10)"


def computed(
    config: Mapping[str, Any], directory: Path, codes: Mapping[int, str | None]
) -> tuple[Any, list[str]]:
    """Log-probabilities, or the error, on a rank whose package is ``codes``'s (None: none is installed), and
    what was logged there."""
    code = codes[dist.get_rank()]
    messages: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    own = directory / f"rank {dist.get_rank()}"
    if code is not None:
        write_package(own, "", code)
    found = (transformer_engine.find, transformer_engine.try_it)
    for cached in found:
        cached.cache_clear()
    transformer_engine.logger.addHandler(handler)
    sys.path.insert(0, str(own))
    importlib.invalidate_caches()
    try:
        with patched((transformer_engine, "will_use_cuda", lambda: True)):
            return jobs.logprobs(config, make_batch(8, 9, seed=0)), messages
    except ConfigError as error:
        return str(error), messages
    finally:
        sys.path.remove(str(own))
        transformer_engine.logger.removeHandler(handler)
        for name in [name for name in sys.modules if name.split(".")[0] == "transformer_engine"]:
            del sys.modules[name]
        for cached in found:
            cached.cache_clear()


@newest_megatron
def test_one_rank_decides_for_all(pool: WorkerPool, tiny_models: dict[str, Path], tmp_path: Path) -> None:
    """A rank with Transformer Engine's layers would wait for its neighbours; each rank without it says why,
    once."""
    config = policy_config(tiny_models["qwen2-tied"], tp=2, pp=2, first=1, last=2)
    plain = pool.run(RANKS, jobs.logprobs, config, make_batch(8, 9, seed=0))[0]
    answers = pool.run(RANKS, computed, config, tmp_path, {0: WORKS, 1: WORKS, 2: LINKER, 3: None})
    assert all(torch.equal(values, plain) for values, _ in answers)
    told = [messages for _, messages in answers]
    fallback = "Transformer Engine cannot be used on rank {}, so no rank uses it: {}. See: megarl doctor"
    assert told == [[], [], [fallback.format(2, REASON)], [fallback.format(3, "it is not installed")]]


@newest_megatron
def test_where_it_is_asked_for_all_ranks_refuse(
    pool: WorkerPool, tiny_models: dict[str, Path], tmp_path: Path
) -> None:
    config = policy_config(tiny_models["qwen2-tied"], tp=2)
    config["megatron_cfg"]["transformer_engine"] = True
    (first, _), (second, _) = pool.run(2, computed, config, tmp_path, {0: WORKS, 1: LINKER})
    assert "works on this rank but not on another" in first and REASON in second


@pytest.mark.parametrize("working", [0, 1, 2], ids="{} of 2".format)
def test_agreement(pool: WorkerPool, working: int) -> None:
    """Whether it works on all, and on any."""
    assert pool.run(2, agreed, working) == [(working == 2, working > 0)] * 2


def agreed(working: int) -> tuple[bool, bool]:
    return transformer_engine._agreed(dist.get_rank() < working)


def built(config: Mapping[str, Any], finds_it: int) -> str:
    """Return the error of building a policy of which only some ranks have found Transformer Engine's
    optimizers."""
    with patched((optimizer.distrib_optimizer, "USING_TE_OPTIMIZER", dist.get_rank() < finds_it)):
        try:
            jobs.build(config, init_reference_model=False).backend.close()
        except ConfigError as error:
            return str(error)
    return ""


@newest_megatron
def test_ranks_with_other_optimizers_are_refused(pool: WorkerPool, tiny_models: dict[str, Path]) -> None:
    """Whose optimizers a rank has is decided by the import of Megatron-Core, which no agreement on the layers
    reaches."""
    config = policy_config(tiny_models["qwen2-tied"])
    assert pool.run(2, built, config, 0) == ["", ""]
    first, second = pool.run(2, built, config, 1)
    host = socket.gethostname()
    assert first == second
    assert (
        f"Transformer Engine's: rank 0 on {host}; none: rank 1 on {host}" in first
        and "bash launch/gpu_environment.sh" in first
    )


def trained_with_sums_in_products(
    config: Mapping[str, Any], batches: list[Mapping[str, Any]]
) -> tuple[dict[str, Any], list[int]]:
    """Train with layers that add the gradients of their weights inside the products, as Transformer Engine's
    do, and no Apex; returns the rows of those weights too. Megatron-Core's own layers stand for Transformer
    Engine's, with a kernel that is written here."""
    rows = set()

    def add(tokens: Tensor, gradient: Tensor, total: Tensor) -> None:
        rows.add(len(total))
        total.add_(gradient.t() @ tokens)

    def portable(config: Any, chunk: int | None, *, fused: bool) -> Any:
        assert fused and config.gradient_accumulation_fusion
        return specs.decoder_spec(config, chunk, fused=False)

    kernel = SimpleNamespace(wgrad_gemm_accum_fp32=add)
    with patched(
        (build, "uses_transformer_engine", lambda policy, *, has_experts: True),
        (build, "decoder_spec", portable),
        (layers, "fused_weight_gradient_mlp_cuda", kernel),
    ):
        return jobs.train(config, batches, NLLLoss()), sorted(rows)


@newest_megatron
@pytest.mark.parametrize("family", ["qwen2-tied", "llama"])
def test_gradients_are_added_in_products_but_for_the_output_layer(
    pool: WorkerPool, tiny_models: dict[str, Path], family: str
) -> None:
    """For the output layer Megatron-Core has Apex's kernel alone, and refuses to build it without."""
    config = policy_config(tiny_models[family], tp=2)
    config["megatron_cfg"]["apply_rope_fusion"] = False
    batches = [make_batch(8, 9, seed=seed) for seed in (0, 1)]
    plain = pool.run(2, jobs.train, config, batches, NLLLoss())[0]
    of_vocabulary = padded_vocabulary(len(plain["weights"]["model.embed_tokens.weight"]), 2) // 2
    for result, rows in pool.run(2, trained_with_sums_in_products, config, batches):
        assert rows and of_vocabulary not in rows
        torch.testing.assert_close(
            torch.tensor(result["losses"]), torch.tensor(plain["losses"]), atol=0, rtol=1e-5
        )
        torch.testing.assert_close(
            torch.tensor(result["norms"]), torch.tensor(plain["norms"]), atol=0, rtol=1e-5
        )
        for name, weight in plain["weights"].items():
            torch.testing.assert_close(result["weights"][name], weight, atol=1e-6, rtol=1e-5)
