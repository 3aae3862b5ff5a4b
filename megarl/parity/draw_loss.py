"""Random losses and advantage estimators, with random combinations of their options.

Combinations that the configuration rules reject, or in which an option has no effect, are not generated: the
caller would only have to sample again.
"""

from __future__ import annotations

import random
from itertools import product

from megarl.parity.options import ADVANTAGES, LOSSES, ONE_OF, Numbers, Options, joined, split, word_of

KINDS = {"pg": 0.5, "nll": 0.1, "dpo": 0.14, "rm": 0.06, "value": 0.09, "distill": 0.11}
"""Probability of each kind of loss."""
GIVEN_SHARE, WISHED_SHARE = 0.4, 0.75
TRIES = 200
# Lower for options that exclude many others, such as noratio; higher for options that others need, such as
# kl.
_SHARES = {
    **{"kl": 0.5, "noratio": 0.12, "seq": 0.45, "dual": 0.3, "cispo": 0.25, "forced": 0.2, "entropy": 0.25},
    **dict.fromkeys(
        ("approx", "gspo", "gspo-token", "constant", "k1", "k2", "pathwise", "tis", "icepop", "seq-mask"), 0.3
    ),
    **dict.fromkeys(("ratio-clamp", "kl-input-clamp", "kl-output-clamp"), 0.25),
}
# This is the probability of each option that the table above does not have.
_SHARE = 0.4
# Each option needs the option that is given here.
_NEEDS = {
    **dict.fromkeys(("approx", "k1", "k2", "pathwise", "kl-input-clamp", "kl-output-clamp"), "kl"),
    **dict.fromkeys(("tis", "icepop", "seq-mask"), "is"),
    **dict.fromkeys(("gspo", "gspo-token", "constant"), "seq"),
    **{"in-reward": "k1", "sft-mean": "sft"},
}
# With their first numbers these options only repeat the default, so they are chosen with other numbers.
_IDLE_WITHOUT_NUMBERS = frozenset(
    {
        "cliprange",
        "ratio-clamp",
        "kl-input-clamp",
        "kl-output-clamp",
        "beta",
        "weight",
        "topk",
        "gamma",
        "lambda",
    }
)
# A loss has at most one option of each of these tuples.
_APART = (
    *ONE_OF,
    ("gspo", "gspo-token", "cispo", "noratio"),
    ("k1", "k2", "pathwise"),
    *product(["dual"], ("noratio", "cispo", "forced")),
    *product(["forced"], ("cispo", "cliprange", "ratio-clamp", "noratio")),
    *product(["noratio"], ("cliprange", "ratio-clamp")),
    *product(("gspo", "gspo-token"), ("constant", "seq-mask")),
    ("in-reward", "approx"),
    ("raw", "sample"),
)
OF_TOKENS = ("given", "gae", "teacher")
"""Kinds of advantages that differ between the tokens of one response. With ``in-reward``, those of
REINFORCE++ do too."""
_WITH_REWARDS_OF_TOKENS = ("grpo", "rloo", "reinforce", "reinforce-baseline", "gae")


def draw_loss(
    generator: random.Random, loss: str | None = None, advantages: str | None = None
) -> dict[str, str]:
    """Return random values for the fields ``loss`` and ``advantages`` of a case.

    Args:
        generator: source of the random choices.
        loss: required kind of loss with required options, such as ``pg+kl``; None for any.
        advantages: required kind of advantages with required options; None for any.
    """
    needed = loss if loss is not None else generator.choices(list(KINDS), list(KINDS.values()))[0]
    kind, given = split(needed)
    for _ in range(TRIES):
        wished = [word_of(option) for option in _wished(generator, LOSSES[kind]) if option not in given]
        drawn = _with_options(generator, joined(needed, wished), LOSSES[kind])
        estimator = advantages if advantages is not None else _estimator(generator, kind, drawn)
        made = _with_options(generator, estimator, ADVANTAGES[split(estimator)[0]])
        if _has_a_meaning(drawn, made):
            return {"loss": drawn, "advantages": made}
    # No tried combination of this loss and estimator is valid. Return the request, so that the configuration
    # rules report the reason.
    return {"loss": loss or "nll", "advantages": advantages or "given"}


def _wished(generator: random.Random, known: Options) -> list[str]:
    """Return one random option with probability ``WISHED_SHARE``, otherwise an empty list.

    A requested option brings in the options that it needs. Without such requests, options that exclude others
    or need others would rarely be generated.
    """
    return [generator.choice(list(known))] if known and generator.random() < WISHED_SHARE else []


def _estimator(generator: random.Random, kind: str, drawn: str) -> str:
    if "in-reward" in split(drawn)[1]:
        return generator.choice(_WITH_REWARDS_OF_TOKENS)
    # The first entry is ``given``, which the last line adds with its own probability.
    known = {"pg": list(ADVANTAGES)[1:], "value": ["gae"]}.get(kind, [])
    return "given" if not known or generator.random() < GIVEN_SHARE else generator.choice(known)


def _with_options(generator: random.Random, needed: str, known: Options) -> str:
    """Return ``needed`` with additional random options and all their dependencies, in the order of the
    options table."""
    kind, given = split(needed)
    names = {*given, *(name for name in known if generator.random() < _SHARES.get(name, _SHARE))}
    # Remove an option whose dependency is missing, because it would have no effect. Options in ``needed`` are
    # kept: their dependencies are added below.
    missing = [name for name in names if name not in given and not _is_complete(name, names)]
    names -= {*missing}
    for name in given:
        # A dependency may have a dependency of its own.
        while (name := _NEEDS.get(name, "")) in known:
            names.add(name)
    words = [
        word_of(name, given.get(name) or _numbers(generator, name, known[name]))
        for name in known
        if name in names
    ]
    return joined(kind, words)


def _is_complete(name: str, names: set[str]) -> bool:
    needed = _NEEDS.get(name)
    return needed is None or (needed in names and _is_complete(needed, names))


def _numbers(generator: random.Random, name: str, listed: tuple[Numbers, ...]) -> Numbers:
    if not listed:
        return ()
    numbers = generator.choice(listed[1:] if name in _IDLE_WITHOUT_NUMBERS else listed)
    # The first numbers are the defaults, so leave them out of the line.
    return () if numbers == listed[0] else numbers


def _has_a_meaning(loss: str, advantages: str) -> bool:
    """Return True if no two options exclude each other and each option has an effect."""
    (kind, options), (estimator, of_estimator) = split(loss), split(advantages)
    names = {*options, *of_estimator}
    if any(len(names & set(apart)) > 1 for apart in _APART):
        return False
    if "in-reward" in names and estimator not in _WITH_REWARDS_OF_TOKENS:
        return False
    # With one advantage per response, the token-level gradient of GSPO equals the sequence-level gradient.
    if "gspo-token" in names and not (
        estimator in OF_TOKENS or (estimator.startswith("reinforce") and "in-reward" in names)
    ):
        return False
    # Forced ratios are 1 for tokens and sequences alike, so a sequence-level loss differs from a token-level
    # loss only in its importance weights.
    if "forced" in names and {"gspo", "gspo-token"} & names and "is" not in names:
        return False
    # A value loss reads returns, which are never whitened.
    if kind == "value" and "white" in names:
        return False
    # These clip bounds are GSPO's, for ratios of whole sequences, which are close to 1. At token level nearly
    # every ratio would be clipped.
    if options.get("cliprange") == (3e-4, 4e-4) and not {"gspo", "gspo-token"} & names:
        return False
    # If only one token is kept, its renormalised probability is always 1, and there is nothing to learn.
    return not (kind == "distill" and "renorm" in names and options.get("topk") == (1.0,))
