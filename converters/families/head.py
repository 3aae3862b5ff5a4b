"""Rules of the score layer, which replaces the output layer of reward and value models."""

from __future__ import annotations

from converters.mapping.rule import Kind, Rule, module_rules
from converters.model_config.architecture import ModelFacts
from converters.model_config.heads import OUTPUT_LAYER


def head_rules(rules: tuple[Rule, ...], facts: ModelFacts) -> tuple[Rule, ...]:
    """Return the rules outside of layers; if the model has a score layer, it replaces the output layer."""
    head = facts.head
    if head is None:
        return rules
    scoring = module_rules(
        "output_layer", Kind.REPLICATED, {"score": (head.labels, facts.hidden_size)}, bias=head.bias
    )
    # The score layer replaces the output layer under the same Megatron-Core name.
    return (*(rule for rule in rules if rule.megatron_name != OUTPUT_LAYER), *scoring)
