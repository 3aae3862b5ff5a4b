"""``megarl convert selftest``: tiny models of a family, generated from its config class and its rules, through every conversion.

Of each variant of a tiny config (:func:`converters.selftest_models.variants`) it checks that

* ``rules``: no name and no place has two rules, and every rule can be what it says (:mod:`converters.selftest_rules`);
* ``tensors``: the rules ask for every tensor that transformers saves, and for no other;
* ``shards``: parameters cut over tensor-parallel ranks and put together again are what they were;
* ``round trip``: import and export give the same bytes, in float32 with every element another, and in bfloat16;
* ``accounting``: each tensor, taken away or renamed, is missed by name;
* ``log-probabilities``: Megatron-Core computes from the rules' parameters what plain transformers computes. This alone can tell whether
  two tensors of one shape have changed places; it runs where a Megatron-Core worker is at hand (``megarl convert``, not
  ``python -m converters``) and transformers knows the family. Where it does not run, the result says why.
"""

from __future__ import annotations

import functools
import json
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from converters.architecture import Architecture, read_architecture
from converters.check import check_source
from converters.errors import ConversionError
from converters.export_plan import plan_export
from converters.exporting import export_model
from converters.families.base import Family
from converters.import_plan import plan_import
from converters.importing import import_model
from converters.megatron_settings import megatron_settings
from converters.opening import open_megatron
from converters.selftest_models import is_known_to_transformers, save_random, save_tensors, save_unique, stored_tensors, variants
from converters.selftest_rules import rule_problems, shard_problems
from converters.source import open_source
from converters.verify import open_any, verify

ComputeLogprobs = Callable[[Path, Tensor], Tensor]
"""From a Hugging Face directory and tokens [B, S] int64 to log-probabilities [B, S] float32, zero in column 0, by Megatron-Core."""
LOGPROB_BOUND = 1e-5
"""Largest difference of a log-probability in float32."""
_VOCABULARY_MULTIPLE = 4
_TOKENS = (3, 17)


@dataclass(frozen=True, slots=True)
class Finding:
    """How a check of a variant went.

    Attributes:
        variant: what is different in its config.
        check: see above.
        result: ``passed``, ``failed``, or ``left out`` where it could not be made.
        text: figures, what failed, or why it was left out.
    """

    variant: str
    check: str
    result: Literal["passed", "failed", "left out"]
    text: str = ""

    def __str__(self) -> str:
        return f"{self.result:<8}  {self.check:<17}  {self.variant}" + (f": {self.text}" if self.text else "")


def selftest(family: Family, config: dict[str, Any], compute: ComputeLogprobs | None = None) -> Iterator[Finding]:
    """Check a family.

    Args:
        family: to be checked; it has to be registered.
        config: parsed ``config.json`` of a tiny model of it.
        compute: log-probabilities by Megatron-Core; None leaves that comparison out.

    Raises:
        ConversionError: the family refuses the config as it is.
    """
    for number, (variant, changed) in enumerate(variants(config, family)):
        try:
            architecture = read_architecture(changed)
        except ConversionError as error:
            if number == 0:
                raise
            yield Finding(variant, "config", "left out", f"refused: {'; '.join(error.details) or error.what}")
            continue
        with tempfile.TemporaryDirectory() as temporary:
            yield from _Variant(variant, family, changed, architecture, Path(temporary)).findings(compute, thorough=number == 0)


@dataclass(frozen=True)
class _Variant:
    name: str
    family: Family
    config: dict[str, Any]
    architecture: Architecture
    directory: Path

    def findings(self, compute: ComputeLogprobs | None, thorough: bool) -> Iterator[Finding]:
        """Every check, until one fails that the next ones need."""
        found = self._checked("rules", lambda: _refuse(list(rule_problems(self.architecture))))
        yield found
        if found.result == "failed":
            return
        save_random(self.model, self.config, self.family, self.architecture)
        known = is_known_to_transformers(self.family)
        found = self._checked("tensors", self._tensors, "" if known else "made of the rules: transformers does not know the family")
        yield found
        if found.result == "failed":
            return
        yield self._checked("shards", lambda: _refuse(list(shard_problems(open_source(self.model), self.architecture))))
        for dtype in (torch.float32, torch.bfloat16):
            yield self._checked("round trip", functools.partial(self._round_trip, dtype), str(dtype).removeprefix("torch."))
        if thorough:
            yield self._checked("accounting", self._accounting)
        yield self._logprobs(compute)

    @property
    def model(self) -> Path:
        """The model with random weights."""
        return self.directory / "model"

    def _checked(self, check: str, run: Callable[[], None], text: str = "") -> Finding:
        try:
            run()
        except ConversionError as error:
            return Finding(self.name, check, "failed", str(error))
        # the rules of a user may fail in any way
        except Exception as error:
            return Finding(self.name, check, "failed", f"{type(error).__name__}: {error}")
        return Finding(self.name, check, "passed", text)

    def _tensors(self) -> None:
        check_source(open_source(self.model), self.architecture)

    def _round_trip(self, dtype: torch.dtype) -> None:
        name = str(dtype).removeprefix("torch.")
        source, middle, back = (self.directory / f"{step}-{name}" for step in ("source", "middle", "back"))
        save_unique(source, self.model, self.architecture, dtype)
        import_model(plan_import(open_source(source), vocab_multiple=_VOCABULARY_MULTIPLE, allow_unsupported=True), middle)
        export_model(plan_export(open_megatron(middle)), back)
        differences = verify(open_any(source), open_any(back)) + verify(open_any(source), open_any(middle))
        before, after = stored_tensors(source), stored_tensors(back)
        differing = [tensor for tensor in before if tensor not in after or not torch.equal(before[tensor], after[tensor])]
        _refuse([str(one) for one in differences] + [f"{tensor} is not what it was" for tensor in differing])

    def _accounting(self) -> None:
        """Each tensor has to be missed when it is away, and to be named when it is called otherwise."""
        tensors, changed = stored_tensors(self.model), self.directory / "changed"
        changed.mkdir()
        problems = []
        for name in sorted(tensors):
            others = {other: tensor for other, tensor in tensors.items() if other != name}
            for stored in (others, {**others, f"{name}.other": tensors[name]}):
                save_tensors(changed, stored)
                try:
                    check_source(open_source(changed), self.architecture, compare_tied=False)
                except ConversionError as error:
                    unnamed = [each for each in (name, *(set(stored) - set(tensors))) if each not in "\n".join(error.details)]
                    problems += [f"{each} is not named when it is wrong" for each in unnamed]
                else:
                    problems.append(f"{name} is not missed")
        _refuse(problems)

    def _logprobs(self, compute: ComputeLogprobs | None) -> Finding:
        check = "log-probabilities"
        if compute is None:
            return Finding(self.name, check, "left out", "no Megatron-Core worker at hand: run this as megarl convert selftest")
        if not is_known_to_transformers(self.family):
            return Finding(self.name, check, "left out", "transformers does not know the family")
        try:
            megatron_settings(self.architecture)
        except ConversionError as error:
            return Finding(self.name, check, "left out", f"Megatron-Core has no such model: {error.what}")
        tokens = torch.randint(0, self.architecture.vocab_size, _TOKENS, generator=torch.Generator().manual_seed(1))
        try:
            difference = float((compute(self.model, tokens) - _transformers_logprobs(self.model, tokens)).abs().max())
        except ConversionError as error:
            return Finding(self.name, check, "failed", str(error))
        result: Literal["passed", "failed"] = "passed" if difference <= LOGPROB_BOUND else "failed"
        return Finding(self.name, check, result, f"largest difference {difference:.3g}, bound {LOGPROB_BOUND:g}")


def _refuse(problems: list[str]) -> None:
    if problems:
        raise ConversionError("these rules do not hold together", "correct the rules of the family", problems)


def _transformers_logprobs(model: Path, tokens: Tensor) -> Tensor:
    from transformers import AutoModelForCausalLM

    with torch.no_grad():
        computed = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, experts_implementation="eager").eval()
        chosen = computed(input_ids=tokens).logits.log_softmax(-1)[:, :-1].gather(2, tokens[:, 1:, None]).squeeze(2)
    return torch.nn.functional.pad(chosen, (1, 0))


def read_tiny_config(path: Path) -> dict[str, Any]:
    """A ``config.json``, or that of a directory.

    Raises:
        ConversionError: it is missing or no JSON object.
    """
    file = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConversionError(f"{file} cannot be read as JSON ({error})", "give the config.json of a tiny model") from error
    if not isinstance(config, dict):
        raise ConversionError(f"{file} is no JSON object", "give the config.json of a tiny model")
    return config
