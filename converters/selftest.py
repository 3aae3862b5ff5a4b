"""Implementation of ``megarl convert selftest``: convert generated tiny models of a family, and check the
results.

Checks for each variant of a tiny config (``variants``):

* ``rules``: names and locations are unique, and the tensors of a rule match its layout.
* ``tensors``: the rules need exactly the tensors that transformers saves.
* ``shards``: parameters are unchanged after sharding over tensor-parallel ranks and joining.
* ``round trip``: import and export give the same bytes, in float32 with distinct elements, and in bfloat16.
* ``accounting``: each removed or renamed tensor is reported by name.
* ``log-probabilities``: Megatron-Core, with the converted parameters, computes the same as transformers. Only
  this check detects swapped tensors of equal shape. It needs a Megatron-Core worker (``megarl convert``, not
  ``python -m converters``) and a family that transformers knows; otherwise the result gives the reason.
* ``config keys``: lists keys that a user-defined family declares but does not read.
"""

from __future__ import annotations

import contextlib
import functools
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from converters.check import check_source
from converters.checkpoint.manifest import dtype_name
from converters.checkpoint.source import HuggingFaceSource, open_source
from converters.checkpoint.work import Answer
from converters.errors import ConversionError
from converters.exporting import export_model, plan_export
from converters.families import family_of, is_built_in
from converters.families.base import Family
from converters.families.head import head_rules
from converters.families.read import read_architecture, unread_keys, with_defaults
from converters.family_file import load_family_file
from converters.files.reading import read_json_object
from converters.importing import import_model, plan_import
from converters.mapping.layouts import padded_vocab_size, shard_layout
from converters.mapping.rule import Kind, Rule, parts_in
from converters.mapping.rules import all_rules, rule_for
from converters.mapping.shards import load_shard, to_hf
from converters.model_config.architecture import Architecture
from converters.model_config.megatron_settings import megatron_settings
from converters.opening import open_any, open_megatron
from converters.selftest_models import (
    is_known_to_transformers,
    save_random,
    save_tensors,
    save_unique,
    stored_tensors,
    tiny_config,
    variants,
)
from converters.torch_dist.keys import is_stacked, stored_place
from converters.verify import logits_of, verify

_TENSOR_PARALLEL_SIZES = (1, 2)
_ONE_PART, _GATE_AND_UP, _HEADS = 1, 2, 3


def rule_problems(architecture: Architecture) -> Iterator[str]:
    """Yield duplicate names, locations shared by two parameters, and tensors that do not match their rule's
    layout."""
    family = family_of(architecture.family)
    rules = [*head_rules(family.model_rules(architecture), architecture)]
    for layer in range(architecture.num_layers):
        rules += family.layer_rules(architecture, layer)
    emitted, stacked = all_rules(architecture), is_stacked(architecture)
    places = (stored_place(rule, architecture, stacked=stacked) for rule in emitted)
    for what, names in {
        "Megatron-Core parameter": [rule.megatron_name for rule in rules],
        "Hugging Face tensor": [part.name for part in parts_in(emitted)],
        "place in a checkpoint": [f"{place.key} {list(place.index)}" for place in places],
    }.items():
        for name, count in Counter(names).items():
            if count > 1:
                yield f"{what} {name} has {count} rules"
    for rule in emitted:
        if rule_for(rule.megatron_name, architecture) != rule:
            yield f"{rule.megatron_name}: another rule is found under this name"
        yield from _part_problems(rule, architecture)


def _part_problems(rule: Rule, architecture: Architecture) -> Iterator[str]:
    shapes = [part.shape for part in rule.parts]
    wanted = {Kind.QKV: _HEADS, Kind.GATED: _GATE_AND_UP, Kind.GROUPED: len(shapes)}.get(rule.kind, _ONE_PART)
    if len(shapes) != wanted:
        yield f"{rule.megatron_name}: {rule.kind} is made of {wanted} tensors, not of {len(shapes)}"
        return
    if len({shape[1:] for shape in shapes}) > 1:
        yield f"{rule.megatron_name}: its tensors differ in more than their rows: {shapes}"
    if rule.kind is Kind.ROW and len(shapes[0]) < 2:
        yield f"{rule.megatron_name}: {rule.kind} is cut by columns, and {rule.hf_names[0]} has none"
    if rule.kind is Kind.VOCAB and shapes[0][0] != architecture.vocab_size:
        yield (
            f"{rule.megatron_name}: {rule.kind} has {architecture.vocab_size} rows, {rule.hf_names[0]} "
            f"has {shapes[0][0]}"
        )
    if rule.kind is Kind.GROUPED:
        spans = shard_layout(rule, architecture.head_dim, 0, 1, 0).spans
        taken = Counter((span.part, row) for span in spans for row in range(span.start, span.stop))
        if taken != Counter((part, row) for part, shape in enumerate(shapes) for row in range(shape[0])):
            yield f"{rule.megatron_name}: its groups do not contain each row of its tensors once"
    if rule.kind is Kind.QKV:
        query, key, value = (shape[0] for shape in shapes)
        if key != value or key % architecture.head_dim or query % key:
            yield (
                f"{rule.megatron_name}: {query}, {key} and {value} rows are no heads of "
                f"{architecture.head_dim} in groups"
            )


def shard_problems(source: HuggingFaceSource, architecture: Architecture) -> Iterator[str]:
    """Yield tensors that differ after their parameter was sharded over ranks and joined."""
    for rule in all_rules(architecture):
        for ranks in _TENSOR_PARALLEL_SIZES:
            padded = padded_vocab_size(architecture.vocab_size, ranks)
            try:
                shards = [
                    load_shard(rule, source, architecture, rank, ranks, padded) for rank in range(ranks)
                ]
            except ConversionError:
                if ranks == 1:
                    raise
                # An odd size of the tiny model cannot be divided.
                continue
            back = dict(to_hf(rule, shards, architecture))
            whole = dict(to_hf(rule, [load_shard(rule, source, architecture)], architecture))
            for part in rule.parts:
                # Compare with the stored tensor, if it is stored alone.
                expected = source.read(part.name) if part.name in source else whole[part.name]
                if not torch.equal(back[part.name], expected):
                    yield (
                        f"{part.name}: after it is split over {ranks} ranks as {rule.kind} and "
                        "joined again, it differs"
                    )


ComputeLogprobs = Callable[[Path, Tensor], Tensor]
"""Computes log-probabilities with Megatron-Core: (Hugging Face directory, tokens [B, S] int64) -> [B, S]
float32, with zeros in column 0."""
LOGPROB_BOUND = 1e-5
"""Maximum absolute difference of a log-probability in float32."""
# Does not divide the tiny vocabulary, so that padding is added and removed.
_VOCABULARY_MULTIPLE = 4
_TOKENS = (3, 17)


@dataclass(frozen=True, slots=True)
class Finding:
    """Result of a check of a variant.

    Attributes:
        variant: what the variant changes in the config.
        check: name of the check.
        result: ``passed``, ``failed``, or ``left out`` if the check could not run.
        text: measurements, the failure, or the reason for ``left out``.
    """

    variant: str
    check: str
    result: Literal["passed", "failed", "left out"]
    text: str = ""

    def __str__(self) -> str:
        return f"{self.result:<8}  {self.check:<17}  {self.variant}" + (f": {self.text}" if self.text else "")


def selftest(
    family: Family, config: dict[str, Any], compute: ComputeLogprobs | None = None
) -> Iterator[Finding]:
    """Run all checks of a family, and yield the results.

    Args:
        family: registered family.
        config: ``config.json`` of a tiny model.
        compute: computes log-probabilities with Megatron-Core; None skips that check.

    Raises:
        ConversionError: the family rejects the unchanged config.
    """
    for number, (variant, changed) in enumerate(variants(config, family)):
        try:
            architecture = read_architecture(changed)
        except ConversionError as error:
            # The first variant is the given config, which must be valid. The family may reject a derived
            # variant.
            if number == 0:
                raise
            yield Finding(variant, "config", "left out", f"refused: {'; '.join(error.details) or error.what}")
            continue
        with tempfile.TemporaryDirectory() as temporary:
            yield from _Variant(variant, family, changed, architecture, Path(temporary)).findings(
                compute, thorough=number == 0
            )


@dataclass(frozen=True)
class _Variant:
    name: str
    family: Family
    config: dict[str, Any]
    architecture: Architecture
    directory: Path

    def findings(self, compute: ComputeLogprobs | None, thorough: bool) -> Iterator[Finding]:
        """Yield the result of each check. Stops after a failure on which later checks depend."""
        note = (
            ""
            if is_known_to_transformers(self.family)
            else "made of the rules: transformers does not know the family"
        )
        found = self._checked("rules", lambda: _refuse([*rule_problems(self.architecture)]))
        yield found
        if found.result == "passed":
            save_random(self.model, self.config, self.family, self.architecture)
            found = self._checked(
                "tensors", lambda: check_source(open_source(self.model), self.architecture), note
            )
            yield found
        if found.result == "failed":
            return
        yield self._checked(
            "shards", lambda: _refuse([*shard_problems(open_source(self.model), self.architecture)])
        )
        for dtype in (torch.float32, torch.bfloat16):
            yield self._checked("round trip", functools.partial(self._round_trip, dtype), dtype_name(dtype))
        if thorough:
            yield self._checked("accounting", self._accounting)
        yield self._logprobs(compute)
        unread = (
            unread_keys(with_defaults(self.config), self.family)
            if thorough and not is_built_in(self.family)
            else []
        )
        if unread:
            text = (
                f"no code reads {', '.join(unread)}: correct if these keys change nothing, which a "
                "comparison of tiny models cannot show"
            )
            yield Finding(self.name, "config keys", "left out", text)

    @property
    def model(self) -> Path:
        """Directory of the model with random weights."""
        return self.directory / "model"

    def _checked(self, check: str, run: Callable[[], None], text: str = "") -> Finding:
        try:
            run()
        except ConversionError as error:
            return Finding(self.name, check, "failed", str(error))
        # A user-defined family may raise anything.
        except Exception as error:
            return Finding(self.name, check, "failed", f"{type(error).__name__}: {error}")
        return Finding(self.name, check, "passed", text)

    def _round_trip(self, dtype: torch.dtype) -> None:
        name = dtype_name(dtype)
        source, middle, back = (self.directory / f"{step}-{name}" for step in ("source", "middle", "back"))
        save_unique(source, self.model, self.architecture, dtype)
        import_model(
            plan_import(open_source(source), vocab_multiple=_VOCABULARY_MULTIPLE, allow_unsupported=True),
            middle,
        )
        export_model(plan_export(open_megatron(middle)), back)
        differences = verify(open_any(source), open_any(back)) + verify(open_any(source), open_any(middle))
        before, after = stored_tensors(source), stored_tensors(back)
        problems = list(map(str, differences))
        for tensor in before:
            if tensor not in after or not torch.equal(before[tensor], after[tensor]):
                problems.append(f"{tensor} differs after the round trip")
        _refuse(problems)

    def _accounting(self) -> None:
        """Check that each tensor is reported by name when it is removed or renamed.

        Raises:
            ConversionError: a tensor is not reported.
        """
        tensors, changed = stored_tensors(self.model), self.directory / "changed"
        changed.mkdir()
        problems = []
        for name in sorted(tensors):
            others = {other: tensor for other, tensor in tensors.items() if other != name}
            for stored in (others, {**others, f"{name}.other": tensors[name]}):
                save_tensors(changed, stored)
                try:
                    # Only names are wrong, so skip the comparison of tied weights, which reads data.
                    check_source(open_source(changed), self.architecture, compare_tied=False)
                except ConversionError as error:
                    for each in (name, *(set(stored) - set(tensors))):
                        if each not in "\n".join(error.details):
                            problems.append(f"{each} has a wrong name, but no error names it")
                else:
                    problems.append(f"{name} is missing, but no error says so")
        _refuse(problems)

    def _logprobs(self, compute: ComputeLogprobs | None) -> Finding:
        check = "log-probabilities"
        if compute is None:
            return Finding(
                self.name,
                check,
                "left out",
                "no Megatron-Core worker at hand: run this as megarl convert selftest",
            )
        if not is_known_to_transformers(self.family):
            return Finding(self.name, check, "left out", "transformers does not know the family")
        try:
            megatron_settings(self.architecture)
        except ConversionError as error:
            return Finding(self.name, check, "left out", f"Megatron-Core has no such model: {error.what}")
        tokens = torch.randint(
            0, self.architecture.vocab_size, _TOKENS, generator=torch.Generator().manual_seed(1)
        )
        try:
            chosen = (
                logits_of(self.model, tokens)
                .log_softmax(-1)[:, :-1]
                .gather(2, tokens[:, 1:, None])
                .squeeze(2)
            )
            difference = float(
                (compute(self.model, tokens) - torch.nn.functional.pad(chosen, (1, 0))).abs().max()
            )
        except ConversionError as error:
            return Finding(self.name, check, "failed", str(error))
        result: Literal["passed", "failed"] = "passed" if difference <= LOGPROB_BOUND else "failed"
        return Finding(
            self.name, check, result, f"largest difference {difference:.3g}, bound {LOGPROB_BOUND:g}"
        )


def _refuse(problems: list[str]) -> None:
    if problems:
        raise ConversionError(
            "the rules of the family are inconsistent", "correct the rules of the family", problems
        )


FAILED = 1


def selftest_of(
    name: str | None,
    family_files: Sequence[Path],
    config: Path | None,
    megatron: Callable[[Sequence[Path]], AbstractContextManager[ComputeLogprobs]] | None,
) -> Answer:
    """Run the self-test of a family.

    Args:
        name: ``model_type`` of the family; None for the family of the last file.
        family_files: files of user-defined families.
        config: ``config.json`` of a tiny model, or its directory; None generates one.
        megatron: context manager that is called with the family files and provides a ``ComputeLogprobs``;
            None without Megatron-Core.

    Returns:
        Exit code, summary for JSON, text for the terminal.

    Raises:
        ConversionError: no family is named, or a tiny model of it cannot be built.
    """
    if name is None and not family_files:
        raise ConversionError("selftest needs a family", "pass --family NAME, or --family-file FILE")
    family = family_of(name) if name is not None else load_family_file(family_files[-1])
    if config is None:
        tiny = tiny_config(family)
    else:
        file = config / "config.json" if config.is_dir() else config
        tiny = read_json_object(file, (f"{file} cannot be read", "give the config.json of a tiny model"))
    with contextlib.ExitStack() as stack:
        _silence_progress_bars(stack)
        compute = stack.enter_context(megatron(family_files)) if megatron is not None else None
        findings = list(selftest(family, tiny, compute))
    counts = Counter(finding.result for finding in findings)
    summary = (
        f"{family.model_type}: "
        f"{', '.join(f'{counts[result]} {result}' for result in ('passed', 'failed', 'left out'))}"
    )
    facts = {
        "family": family.model_type,
        "passed": not counts["failed"],
        "findings": list(map(asdict, findings)),
    }
    return (FAILED if counts["failed"] else 0), facts, "\n".join([*map(str, findings), summary])


def _silence_progress_bars(stack: contextlib.ExitStack) -> None:
    from transformers.utils import logging

    if logging.is_progress_bar_enabled():
        logging.disable_progress_bar()
        stack.callback(logging.enable_progress_bar)
