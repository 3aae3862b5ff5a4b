"""Options of losses and of advantage estimators: words after plus signs, some with numbers after colons.

``pg+seq+constant:2.5`` is the clipped policy gradient with the options ``seq`` and ``constant``, the latter
with the number 2.5. An option without numbers has the first ones that are listed here; the others are sampled
as well. ``none`` is no bound.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from functools import cache
from types import MappingProxyType

Numbers = tuple[float | None, ...]
Options = Mapping[str, tuple[Numbers, ...]]

LOSSES: Mapping[str, Options] = MappingProxyType(
    {
        "nll": {},
        "pg": {
            "kl": ((0.1,), (0.02,), (0.5,)),
            "approx": (),
            "is": (),
            "dual": ((1.5,), (1.2,), (3.0,)),
            "seq": (),
            "noratio": (),
            "gspo": (),
            "gspo-token": (),
            "cispo": (),
            "constant": ((6.0,), (2.5,), (16.0,)),
            "forced": (),
            "cliprange": ((0.2, 0.28), (0.1, 0.1), (0.3, 0.5), (1.0, 0.28), (3e-4, 4e-4)),
            "k1": (),
            "k2": (),
            "pathwise": (),
            "in-reward": (),
            "tis": ((1.1,), (1.02,), (1.3,)),
            "icepop": ((0.85, 1.15), (None, 1.15), (0.7, 1.2)),
            "seq-mask": ((0.93, 1.05), (None, 1.05), (0.85, 1.2)),
            "entropy": ((0.3,), (0.05,), (1.0,)),
            "ratio-clamp": ((20.0,), (0.3,), (None,)),
            "kl-input-clamp": ((20.0,), (0.3,), (None,)),
            "kl-output-clamp": ((10.0,), (0.06,), (None,)),
        },
        "dpo": {
            "sft": ((0.2,), (1.0,)),
            "mean": (),
            "sft-mean": (),
            "ipo": (),
            "beta": ((0.3,), (0.1,), (1.0,)),
            "weight": ((1.0,), (0.5,), (2.0,)),
        },
        "rm": {},
        "value": {"clip": ((0.2,), (0.1,), (0.5,))},
        "distill": {
            "renorm": (),
            "forward": (),
            "mixed": ((0.3,), (0.8,)),
            "topk": ((3.0,), (1.0,), (2.0,), (5.0,)),
        },
    }
)
"""Options of each loss, with their numbers.

Options of ``pg``, the clipped policy gradient:

* ``kl`` adds the divergence from the reference policy, with its weight. ``approx`` weights it by how much
  likelier a token is now than when it was sampled. ``k1`` and ``k2`` are other estimators of it, ``pathwise``
  omits the score function's part of its gradient, and ``in-reward`` subtracts it from the rewards before
  advantages are computed.
* ``is`` weights tokens by importance weights, relative to the policy that sampled them. ``tis`` (upper
  bound), ``icepop`` and ``seq-mask`` (lower and upper bound) bound these weights.
* ``dual`` is the second clip. ``seq`` takes the mean over sequences, and ``constant`` divides by a constant
  instead (Dr.GRPO).
* ``noratio`` uses the log-probability instead of the ratio. ``forced`` uses the current log-probabilities as
  the previous ones. ``gspo`` and ``gspo-token`` are ratios of sequences, with the gradient of the sequence or
  of the token. ``cispo`` uses the clipped ratio as a weight.
* ``cliprange`` is the distance below and above 1 at which ratios are clipped. ``entropy`` is the weight of an
  entropy bonus. The clamps bound the logarithms of ratios, the differences that the divergence is estimated
  from, and the estimate.

Options of ``dpo``: ``ipo`` uses IPO's square instead of DPO's logarithm; ``mean`` uses the mean over tokens
as the reward; ``sft`` adds the likelihood of the chosen answers, ``sft-mean`` its mean over tokens; ``beta``
and ``weight`` are those of the preference loss.

Option of ``value``, the loss of a value model: ``clip`` bounds the change of a value. ``rm`` is
Bradley-Terry.

Options of ``distill``, the reverse divergence from a teacher over its most likely tokens: ``topk`` is their
number, ``forward`` uses the forward divergence, ``mixed`` is the weight of the forward divergence in a sum of
both. All other tokens form one outcome, unless ``renorm`` excludes them.
"""

_OF_GROUPS: Options = {
    "sample": (),
    "raw": (),
    "plain": (),
    "clip": ((-0.6, 0.8), (-1.0, None), (None, 0.5)),
}
ADVANTAGES: Mapping[str, Options] = MappingProxyType(
    {
        "given": {},
        "grpo": _OF_GROUPS,
        "rloo": {"clip": _OF_GROUPS["clip"]},
        "gdpo": _OF_GROUPS,
        "reinforce": {"clip": _OF_GROUPS["clip"]},
        "reinforce-baseline": {"clip": _OF_GROUPS["clip"]},
        "gae": {
            "gamma": ((1.0,), (0.9,)),
            "lambda": ((0.95,), (0.0,), (0.6,), (1.0,)),
            "bootstrap": (),
            "white": (),
        },
        "teacher": {"clip": ((-0.3, 0.4), (-0.5, None), (None, 0.2))},
    }
)
"""Options of each source of advantages: ``given``, or computed as a driver does from rewards, from values
(``gae``, of PPO) or from a teacher's log-probabilities (``teacher``, distillation by a policy gradient).
``reinforce`` is REINFORCE++.

``raw`` does not divide by the deviation of a group, ``sample`` divides by the sample deviation, ``plain``
includes a response's own reward in its baseline, ``clip`` bounds advantages. Options of generalized
advantages are ``gamma``, ``lambda``, ``bootstrap`` after truncated responses, and ``white``, which whitens
them.
"""
ONE_OF = (("gspo", "gspo-token"), ("k1", "k2"), ("tis", "icepop", "seq-mask"), ("forward", "mixed"))
"""Groups of options that exclude each other, because they are values of the same configuration key."""


@cache
def split(text: str) -> tuple[str, Mapping[str, Numbers]]:
    """Return the kind and its options, each with the numbers that the text gives; empty numbers stand for the
    option's defaults.

    Raises:
        ValueError: a number is invalid.
    """
    kind, *words = text.split("+")
    options = {}
    for word in words:
        name, *numbers = word.split(":")
        options[name] = tuple(None if number == "none" else float(number) for number in numbers)
    # Make the mapping read-only, because all callers get the same one from the cache.
    return kind, MappingProxyType(options)


def numbers_of(text: str, option: str) -> Numbers:
    """Return the numbers of an option of a loss or an estimator, or the option's default numbers if the text
    does not give any."""
    kind, options = split(text)
    return options.get(option) or {**LOSSES, **ADVANTAGES}[kind][option][0]


def word_of(option: str, numbers: Numbers = ()) -> str:
    """Return an option with its numbers as a word of a line."""
    return ":".join([option, *("none" if number is None else f"{number:g}" for number in numbers)])


def joined(kind: str, words: Iterable[str]) -> str:
    """Return a kind with its options, in the form that ``split`` reads."""
    return "+".join([kind, *words])


def fault_of(text: str, kinds: Mapping[str, Options]) -> str:
    """Return what is wrong with a loss or an advantage estimator; empty if nothing is."""
    kind, *words = text.split("+")
    if kind not in kinds:
        return f"expected one of {', '.join(kinds)}"
    known, names = kinds[kind], [word.partition(":")[0] for word in words]
    for word, name in zip(words, names, strict=True):
        if name not in known:
            return f"{kind} has no option {name!r}; it has {', '.join(known) or 'none'}"
        if names.count(name) > 1:
            return f"{name!r} is given twice; keep one of the two"
        fault = _fault_of_numbers(word, known[name])
        if fault:
            return fault
    for exclusive in ONE_OF:
        if len({*exclusive} & {*names}) > 1:
            return f"a loss has at most one of {', '.join(exclusive)}"
    return ""


def _fault_of_numbers(word: str, listed: tuple[Numbers, ...]) -> str:
    _, *given = word.split(":")
    count = len(listed[0]) if listed else 0
    if given and len(given) != count:
        return f"{word!r} has {len(given)} numbers, but the option takes {count}"
    try:
        numbers = [float(text) for text in given if text != "none"]
    except ValueError:
        return f"{word!r}: expected numbers, or none"
    return "" if all(map(math.isfinite, numbers)) else f"{word!r}: expected finite numbers"
