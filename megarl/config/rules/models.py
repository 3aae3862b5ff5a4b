"""Rules on models other than the policy: the policy's rules, with the model's section in the place of
``policy``."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from converters.model_config.architecture import ModelFacts
from megarl.config.backend import scores
from megarl.config.models import POLICY, as_of_policy
from megarl.config.nested import at
from megarl.config.rules.adapters import ADAPTER_RULES, only_trained_models_have_adapters
from megarl.config.rules.backends import BACKEND_RULES
from megarl.config.rules.generation import LONGEST, NEW_TOKENS, PROMPT
from megarl.config.rules.optimizer import OPTIMIZER_RULES
from megarl.config.rules.parallel import EXPERT_RULES, PARALLEL_RULES, training_shape
from megarl.config.rules.run import SCORING, TOKEN_RULES, TRAINED_BATCH_RULES, megatron_trains
from megarl.config.rules.table import TABLE_OF_MODELS
from megarl.config.rules.view import NotApplicableError, Rule, View
from megarl.config.sections import Config
from megarl.errors import Violation

if TYPE_CHECKING:
    from megarl.config.plugins import ModelSection

# Extra top-level key of a model's view: true if its section wants a score head.
_WANTED = "wanted_head"


def with_model_as_policy(config: Mapping[str, Any], path: str, faulty: Collection[str] = ()) -> Config:
    """Return a run's configuration with the section at ``path`` in the place of ``policy``, and with the
    cluster reduced to the training ranks."""
    cluster = config.get("cluster")
    try:
        # If this raises, the policy's own rules report the reason.
        nodes, ranks = training_shape(View(config, faulty))
        cluster = {**config["cluster"], "gpus_per_node": ranks, "num_nodes": nodes, "for_training": True}
    except NotApplicableError:
        pass
    return {**config, "cluster": cluster, POLICY: at(config, path)}


def model_view(
    config: Mapping[str, Any],
    path: str,
    section: ModelSection,
    faulty: Collection[str],
    facts: ModelFacts | None,
) -> View:
    """Return the view with which the rules check a model's section. For a model that is not trained it lacks
    ``algorithm``, so rules on training do not apply.

    Args:
        config: the run's configuration with its defaults.
        path: dotted path of the section.
        section: declaration of the section.
        faulty: dotted paths of values of the wrong type.
        facts: sizes of the model; None if unknown.
    """
    seen = {**with_model_as_policy(config, path, faulty), _WANTED: section.scores}
    if not section.is_trained:
        # Rules on training read the algorithm, and do not apply without it.
        seen.pop("algorithm", None)
    # The rules see the section at ``path`` as ``policy``. So its faulty keys are named as keys of ``policy``,
    # and the faulty keys of the policy itself, which they do not see, are left out.
    own = {as_of_policy(key, [path]) for key in faulty if not key.startswith(POLICY)}
    return View(seen, own, facts)


def model_has_the_head_of_its_section(view: View) -> Iterator[Violation]:
    """Require a score head for a section of a reward model or critic, and none for a language model."""
    view.require(not view.has_faults(SCORING) and scores(view[POLICY]) != view[_WANTED])
    key = f"{SCORING}.enabled"
    if view[_WANTED]:
        yield Violation(
            key, view.get(key), "this section needs a scoring model", "write true, or remove the line"
        )
    else:
        yield Violation(key, True, "this section needs a language model", f"write false, or remove {SCORING}")


_BACKBONE = (
    "family",
    "num_layers",
    "hidden_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "ffn_hidden_size",
    "vocab_size",
)


def backbone_is_that_of_the_policy(
    path: str, section: ModelSection, model_name: object, policy: ModelFacts | None, facts: ModelFacts | None
) -> Iterator[Violation]:
    """Require that a model has the policy's family and sizes, if its section demands that and both are
    known.

    Args:
        path: dotted path of the model's section.
        section: declaration of the section.
        model_name: value of ``model_name`` in the section, for the violation.
        policy: sizes of the policy's model.
        facts: sizes of the model.
    """
    if not section.has_backbone_of_policy or policy is None or facts is None:
        return
    own, wanted = [], []
    for name in _BACKBONE:
        if getattr(policy, name) != getattr(facts, name):
            own.append(f"{name} {getattr(facts, name)}")
            wanted.append(f"{name} {getattr(policy, name)}")
    if own:
        bound = (
            f"its backbone differs from the policy's: {', '.join(own)}; the policy has {', '.join(wanted)}"
        )
        yield Violation(
            f"{path}.model_name",
            model_name,
            bound,
            "remove the line, or give a model with the policy's backbone",
        )


def length_is_at_least_the_policy_s(view: View, path: str) -> Iterator[Violation]:
    """Require that the model at ``path`` accepts the policy's longest sequences, because it reads them."""
    key, longest = LONGEST.replace(POLICY, path, 1), view[LONGEST]
    # With several turns a conversation has several responses, so only the maximum sequence length bounds it.
    if view.has(NEW_TOKENS) and view.get(f"{view.algorithm.section()}.max_rollout_turns", 1) == 1:
        longest = min(longest, view[PROMPT] + view[NEW_TOKENS])
    if view[key] < longest:
        bound = f"it reads sequences of the policy, of up to {longest} tokens"
        yield Violation(key, view[key], bound, f"write {longest} or more, or remove the line")


MODEL_RULES: tuple[Rule, ...] = (
    *BACKEND_RULES,
    *PARALLEL_RULES,
    *EXPERT_RULES,
    *OPTIMIZER_RULES,
    *TOKEN_RULES,
    model_has_the_head_of_its_section,
    *TABLE_OF_MODELS,
    *ADAPTER_RULES,
    only_trained_models_have_adapters,
)
TRAINED_MODEL_RULES: tuple[Rule, ...] = (*TRAINED_BATCH_RULES, megatron_trains)
