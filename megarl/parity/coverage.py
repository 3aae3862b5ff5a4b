"""Count how often each feature was tested, per backend and precision, in cases that passed."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from itertools import combinations

from rich.console import Console
from rich.table import Table

from megarl.parity.case import (
    BACKENDS,
    BATCHINGS,
    DENSE,
    OF_MEGATRON,
    PATHS,
    PRECISIONS,
    RECIPE_EPSILON,
    SPARSE,
    Case,
)

_LOSS_NAMES = {
    "nll": "loss: NLL",
    "pg": "loss: clipped policy gradient",
    "dpo": "loss: DPO",
    "rm": "loss: Bradley-Terry, of a model that scores",
    "value": "loss: of a value model",
    "distill": "loss: divergence from a teacher",
}
_OPTION_NAMES = {
    "pg": {
        "seq": "mean over sequences",
        "constant": "constant normaliser (Dr.GRPO)",
        "gspo": "ratios of sequences (GSPO)",
        "gspo-token": "ratios of sequences, gradients of tokens (GSPO-token)",
        "cispo": "clipped ratios as weights (CISPO)",
        "noratio": "no ratios",
        "forced": "previous log-probabilities that are the current ones",
        "dual": "dual clip",
        "cliprange": "other bounds of ratios",
        "ratio-clamp": "other clamp of ratios",
        "is": "importance weights",
        "tis": "truncated importance sampling (TIS)",
        "icepop": "weights out of bounds are 0 (IcePop)",
        "seq-mask": "sequences out of bounds are left out",
        "kl": "divergence from the reference policy",
        "k1": "divergence: k1",
        "k2": "divergence: k2",
        "pathwise": "divergence: pathwise gradient",
        "approx": "divergence: weighted",
        "kl-input-clamp": "divergence: other clamp of differences",
        "kl-output-clamp": "divergence: other clamp of estimates",
        "in-reward": "divergence taken from the rewards",
        "entropy": "entropy bonus",
    },
    "dpo": {
        "ipo": "preferences: IPO (within measured bounds)",
        "mean": "preferences: mean over tokens",
        "sft": "preferences: likelihood of the chosen answers",
        "sft-mean": "preferences: mean likelihood of the chosen answers",
        "beta": "preferences: other beta",
        "weight": "preferences: other weight",
    },
    "value": {"clip": "values clipped"},
    "distill": {
        "renorm": "divergence from a teacher: its tokens alone",
        "forward": "divergence from a teacher: forward",
        "mixed": "divergence from a teacher: mixed",
        "topk": "divergence from a teacher: other numbers of tokens",
    },
}
_ADVANTAGE_NAMES = {
    "grpo": "advantages: GRPO",
    "rloo": "advantages: RLOO",
    "gdpo": "advantages: GDPO",
    "reinforce": "advantages: REINFORCE++",
    "reinforce-baseline": "advantages: REINFORCE++-baseline",
    "gae": "advantages and returns: generalized (PPO)",
    "teacher": "advantages: of a teacher (distillation)",
}
_ADVANTAGE_OPTION_NAMES = {
    "raw": "advantages not divided by deviations",
    "sample": "advantages: deviations of samples",
    "plain": "advantages: an answer in its own baseline",
    "clip": "advantages clipped",
    "gamma": "generalized advantages: discount",
    "lambda": "generalized advantages: other lambda",
    "bootstrap": "generalized advantages: value behind what was cut off",
    "white": "generalized advantages whitened",
}


def _choices(key: str, chosen: str, names: Iterable[str]) -> dict[str, bool]:
    return {f"{key}: {name}": name == chosen for name in names}


def _table(case: Case) -> dict[str, bool]:
    """Return feature -> whether the case has it, in the order of the table."""
    loss, options, made = case.loss_kind, case.loss_options, case.advantages_options
    # With all experts selected, the load is always balanced.
    balanced = case.balance if case.topk < case.experts else "none"
    return {
        **_choices("family", case.family, (*DENSE, *OF_MEGATRON, *SPARSE)),
        "tied embeddings": case.tied,
        "rope scaling": case.rope != "default",
        "sliding window": case.window > 0,
        "tensor parallel": case.tp > 1,
        "sequence parallel": case.sp,
        "pipeline parallel": case.pp > 1,
        "context parallel": case.cp > 1,
        "expert parallel": case.ep > 1,
        "data parallel": case.dp > 1,
        "ring attention": case.comm == "p2p",
        "written tensor-parallel plan": case.plan != "built-in",
        "uneven stages": bool(case.first or case.last),
        "written pipeline layout": bool(case.layout),
        "virtual pipeline": case.vpp > 1,
        "expert tensor parallel": case.etp > 1,
        "expert dispatch: alltoall": case.experts > 0 and case.dispatcher == "alltoall",
        "expert dispatch: allgather": case.dispatcher == "allgather",
        "load balancing: global batch": balanced == "aux",
        "load balancing: sequence": balanced == "seq",
        "router z-loss": case.zloss,
        "frozen routers": case.freeze,
        "routers in float32 or float64": case.router != "model",
        **_choices("batching", case.batching, BATCHINGS),
        **{name: kind == loss for kind, name in _LOSS_NAMES.items()},
        **{
            name: kind == loss and option in options
            for kind, names in _OPTION_NAMES.items()
            for option, name in names.items()
        },
        **{name: kind == case.advantages_kind for kind, name in _ADVANTAGE_NAMES.items()},
        **{name: option in made for option, name in _ADVANTAGE_OPTION_NAMES.items()},
        **_choices("precision", case.precision, PRECISIONS),
        "temperature": case.temperature != 1.0,
        "top-k": case.keep > 0,
        "top-p": case.nucleus < 1,
        "masked samples": case.masked == "some",
        "segments that share an advantage": case.segments > 1,
        "samples in groups, not trained on": case.masked == "some" and case.compares_answers,
        "zero valid tokens on a rank": case.masked == "rank" and case.dp > 1,
        "zero valid tokens": case.masked == "all",
        "optimizer: Adam": case.optimizer == "adam",
        "Adam with epsilon 1e-8": case.optimizer == "adam" and case.eps == RECIPE_EPSILON,
        "optimizer: SGD": case.optimizer == "sgd",
        "gradient clipping": case.clip > 0,
        "learning-rate warm-up": case.warmup,
        "learning-rate decay": case.schedule != "constant",
        "warm-up, then decay": case.warmup and case.schedule != "constant",
        "weight-decay growth": case.decay != "constant",
        "gradients summed in float32": case.wide,
        "distributed optimizer": case.distopt,
        "overlapped reductions": case.overlap,
        "activation recompute": case.recompute,
        **_choices("paths", case.paths, PATHS),
        "output layer in chunks": case.chunk > 0,
        "HybridModel": case.model_class == "hybrid",
        "reference policy": case.reference,
        "evaluation": case.evaluate,
        "two global batches a call": case.together,
        "offload": case.offload,
        "adapters": case.lora > 0,
        "adapters of experts": case.stacks,
        "adapters of embedding and output layer": case.outer,
    }


FEATURES = tuple(_table(Case()))
"""All features, in the order of the table."""


def features(case: Case) -> list[str]:
    """Return the features of a case, in the order of ``FEATURES``."""
    return [name for name, has in _table(case).items() if has]


def _column(backend: str, half: bool) -> str:
    return f"{backend} 16 bit" if half else backend


COLUMNS = tuple(_column(backend, half) for half in (False, True) for backend in BACKENDS)
"""Columns of the table: each backend in float32, then each in 16 bit."""


class Coverage:
    """Counts of features and of pairs of features in cases that passed, per backend and precision."""

    def __init__(self) -> None:
        self._single = defaultdict[str, Counter[str]](Counter)
        self._pairs = defaultdict[str, Counter[str]](Counter)
        self._cases: Counter[str] = Counter()

    def add(self, case: Case) -> None:
        """Count a case that passed."""
        found, column = features(case), _column(case.backend, case.half)
        self._cases[column] += 1
        self._single[column].update(found)
        self._pairs[column].update(map(" + ".join, combinations(found, 2)))

    def to_json(self) -> dict[str, dict[str, dict[str, int]]]:
        """Return ``features`` and ``pairs``: column -> name -> count. The feature ``all`` counts all
        cases."""
        features: dict[str, dict[str, int]] = {}
        pairs: dict[str, dict[str, int]] = {}
        for column in self._used():
            features[column] = {
                "all": self._cases[column],
                **{name: self._single[column][name] for name in FEATURES},
            }
            pairs[column] = dict(sorted(self._pairs[column].items()))
        return {"features": features, "pairs": pairs}

    def _used(self) -> list[str]:
        return [column for column in COLUMNS if self._cases[column]]

    def show(self, console: Console) -> None:
        """Print a table of features per column; a dash means that no case had the feature."""
        used = self._used()
        table = Table(title="passed cases that had a feature")
        table.add_column("feature")
        for column in used:
            table.add_column(column, justify="right")
        table.add_row("all", *(str(self._cases[column]) for column in used), style="bold")
        for name in FEATURES:
            table.add_row(name, *(str(self._single[column][name] or "-") for column in used))
        console.print(table)
