"""Options of losses and advantage estimators, written as words after plus signs with optional numbers after
colons.

``pg+seq+constant:2.5`` is the clipped policy gradient with the options ``seq`` and ``constant``, where
``constant`` has the number 2.5. The tables list the possible numbers of each option: the first entry is the
default, and random cases use the others too. ``none`` means no bound.
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
"""Options of each loss, with the numbers that random cases use.

Options of ``pg``, the clipped policy gradient:

* ``kl`` adds the KL penalty to the loss; its number is the coefficient. ``approx`` weights the penalty of
  each token by the ratio of its current probability to its sampling probability. ``k1`` and ``k2`` select
  another KL estimator than k3, ``pathwise`` omits the score-function term of the KL gradient, and
  ``in-reward`` subtracts the KL from the rewards instead of adding it to the loss.
* ``is`` multiplies each token's loss by its importance weight relative to the policy that sampled it. ``tis``
  caps these weights (upper bound), ``icepop`` sets weights outside its two bounds to 0, and ``seq-mask`` all
  weights of a sequence whose geometric mean is outside.
* ``dual`` is the bound of dual-clip PPO for negative advantages. ``seq`` averages over the tokens of each
  response and then over responses; ``constant`` divides by a constant instead of the response length
  (Dr.GRPO).
* ``noratio`` uses the log-probability instead of the probability ratio. ``forced`` uses the current
  log-probabilities as the previous ones, so every ratio is 1. ``gspo`` and ``gspo-token`` use sequence-level
  ratios, with the gradient taken per sequence or per token. ``cispo`` uses the clipped ratio as a constant
  weight.
* ``cliprange`` sets the distances below and above 1 at which ratios are clipped. ``entropy`` is the
  coefficient of an entropy bonus. ``ratio-clamp`` clamps the log-ratio, ``kl-input-clamp`` the log-ratio that
  the KL is estimated from, and ``kl-output-clamp`` the KL estimate.

Options of ``dpo``: ``ipo`` uses the squared loss of IPO instead of the log-sigmoid; ``mean`` averages the
reward over tokens instead of summing; ``sft`` adds the negative log-likelihood of the chosen response,
``sft-mean`` its mean over tokens; ``beta`` is the KL coefficient of DPO, ``weight`` the factor on the
preference loss.

``rm`` is the Bradley-Terry loss of a reward model. The option ``clip`` of ``value``, the loss of a value
model, limits how far a value may move from its old value.

Options of ``distill``, the reverse KL from a teacher over its most likely tokens: ``topk`` is the number of
these tokens, ``forward`` uses the forward KL, and ``mixed`` is the weight of the forward KL in a sum of both.
All other tokens together form one outcome, unless ``renorm`` excludes them.
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
"""Options of each source of advantages.

``given`` means random advantages in the batch. All other sources compute advantages as a driver does: from
rewards, from values (``gae``, for PPO) or from the log-probabilities of a teacher (``teacher``, distillation
by a policy gradient). ``reinforce`` is REINFORCE++.

``raw`` does not divide by the standard deviation of the group, ``sample`` divides by the sample standard
deviation, ``plain`` includes a response's own reward in its baseline, and ``clip`` clips advantages. ``gae``
has the parameters ``gamma`` and ``lambda``; ``bootstrap`` uses the last value as the return after a truncated
response, and ``white`` whitens the advantages.
"""
ONE_OF = (("gspo", "gspo-token"), ("k1", "k2"), ("tis", "icepop", "seq-mask"), ("forward", "mixed"))
"""Groups of options of which a loss may have only one, because they are values of the same configuration
key."""


@cache
def split(text: str) -> tuple[str, Mapping[str, Numbers]]:
    """Return the kind and its options, each with the numbers in the text. An option without numbers maps to
    ``()``, which stands for its defaults.

    Raises:
        ValueError: a number is invalid.
    """
    kind, *words = text.split("+")
    options = {}
    for word in words:
        name, *numbers = word.split(":")
        options[name] = tuple(None if number == "none" else float(number) for number in numbers)
    # All callers share the cached mapping, so it must be read-only.
    return kind, MappingProxyType(options)


def numbers_of(text: str, option: str) -> Numbers:
    """Return the numbers of an option in the text, or the option's defaults if the text gives none."""
    kind, options = split(text)
    # No loss has the name of an estimator, so the two tables can be merged.
    return options.get(option) or {**LOSSES, **ADVANTAGES}[kind][option][0]


def word_of(option: str, numbers: Numbers = ()) -> str:
    """Format an option and its numbers as one word, such as ``icepop:none:1.15``."""
    return ":".join([option, *("none" if number is None else f"{number:g}" for number in numbers)])


def joined(kind: str, words: Iterable[str]) -> str:
    """Join a kind and its option words into the form that ``split`` reads."""
    return "+".join([kind, *words])


def fault_of(text: str, kinds: Mapping[str, Options]) -> str:
    """Return an error message for an invalid loss or advantage estimator; an empty string if it is valid."""
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
