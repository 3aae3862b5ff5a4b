"""Choice of ``train_mb_tokens: auto``: the largest token budget of a micro-batch for which the memory plan
fits."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

from megarl.config.backend import enabled_backend
from megarl.config.engines import is_engine, kind_of
from megarl.config.layout import Layout
from megarl.config.memory_run import GIB, device_gib
from megarl.config.nested import at, put
from megarl.config.plan import batch_plan, fullest_moment, size_text
from megarl.config.rules.parallel import layout_of
from megarl.config.rules.run import least_tokens
from megarl.config.rules.view import View
from megarl.config.sections import Config, RunConfig
from megarl.errors import ConfigError, Violation

logger = logging.getLogger(__name__)
AUTO = "auto"
SECTIONS = ("policy.sequence_packing", "policy.dynamic_batching")
ROOM = 0.95
"""Share of a device's memory that the plan may fill with a chosen budget. The rest is for fragmentation and
other memory outside the plan. Assumed, not measured."""
# Rules only require a minimum, so the largest budget satisfies them while the others are checked.
# _STEPS budgets are tried at most; all are the minimum plus a multiple of _MULTIPLE tokens.
_LARGEST, _STEPS, _MULTIPLE = 2**30, 64, 64


def with_token_budgets(given: Config, validate: Callable[[Config], RunConfig]) -> Config:
    """Return a configuration with each ``train_mb_tokens: auto`` replaced by a number.

    Args:
        given: the configuration as plain containers.
        validate: checks a configuration and fills in its defaults.

    Raises:
        ConfigError: no budget fits, the memory plan lacks information, or another value is invalid.
    """
    for section in SECTIONS:
        key = f"{section}.train_mb_tokens"
        if at(given, key) != AUTO:
            continue
        checked = validate(put(given, key, _LARGEST))
        # Nothing is read from a section that is not enabled.
        tokens = (
            _chosen(checked, key)
            if at(checked, f"{section}.enabled")
            else least_tokens(View(checked), section)
        )
        given = put(given, key, tokens)
    return given


def _chosen(config: RunConfig, key: str) -> int:
    unknown = _unknown(config)
    if unknown is not None:
        bound, fix = unknown
        raise ConfigError([Violation(key, AUTO, bound, f"{fix}, or write a number of tokens")])
    available, least = (
        ROOM * device_gib(config["cluster"]) * GIB,
        least_tokens(View(config), key.rpartition(".")[0]),
    )
    most = max(least, _tokens_of_step(config, layout_of(View(config))))
    # The first budget that fits is the largest one.
    for tokens in _descending(least, most):
        moment = fullest_moment(put(config, key, tokens))
        if moment is not None and moment.total <= available:
            logger.info(
                "%s: auto is %d tokens; %s takes %s of a device",
                key,
                tokens,
                moment.name,
                size_text(moment.total),
            )
            return tokens
    moment = fullest_moment(put(config, key, least))
    assert moment is not None, "the model's sizes are known"
    bound = (
        f"{moment.name} takes {size_text(moment.total)} with the fewest tokens, {least:,}, and at "
        f"most {size_text(int(available))} may be used"
    )
    raise ConfigError(
        [Violation(key, AUTO, bound, f"write {least}, and megarl train --dry-run shows what would fit")]
    )


def _unknown(config: RunConfig) -> tuple[str, str] | None:
    """Return (what the memory plan does not know, how to fix that), or None if a plan is possible."""
    cluster, generation = config["cluster"], config["policy"]["generation"]
    if cluster["device"] == "cpu":
        return "there is no memory plan for ranks on a CPU", "run on GPUs"
    if cluster["device_memory_gib"] is None:
        return "cluster.device_memory_gib is null, so the memory of a device is unknown", "write it"
    if generation is not None and is_engine(generation) and generation["colocated"]["enabled"]:
        kind = kind_of(generation)
        if kind is None or kind.memory is None:
            return (
                f"the memory of engines of {generation['backend']} on the policy's devices is not known",
                "give them devices of their own",
            )
    if fullest_moment(config) is None:
        return f"the sizes of {config['policy']['model_name']} are not on this disk", "fetch the model"
    return None


def _tokens_of_step(config: RunConfig, layout: Layout) -> int:
    """Return the largest sensible budget: a data-parallel rank's tokens of a global batch, divided by the
    number of pipeline stages. A larger budget gives fewer micro-batches than stages, and stages would be
    idle."""
    plan = batch_plan(config, layout)
    stages = layout.pipeline if enabled_backend(config["policy"]) == "megatron" else 1
    return plan.global_batch_size * plan.sequence_length // (plan.data_parallel * stages)


def _descending(least: int, most: int) -> Iterator[int]:
    """Yield budgets from ``most`` to ``least``, each a few percent below the previous one. Bisection would
    be wrong, because memory does not grow steadily: larger micro-batches may mean that fewer are in
    flight."""
    ratio = (most / least) ** (1 / _STEPS)
    found = {least + int(least * ratio**step - least) // _MULTIPLE * _MULTIPLE for step in range(_STEPS + 1)}
    yield from sorted(found, reverse=True)
