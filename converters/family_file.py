"""User-defined model families, from Python files.

The file is a module that defines ``FAMILY``, a ``Family``. It may import whatever it needs;
``converters.families.dense`` and ``converters.families.sparse`` have the rules of plain decoders and of
mixtures of experts to start from. A family that is Qwen2 with other names for its MLP::

    from dataclasses import replace

    from converters.families import dense, qwen2

    def layer_rules(architecture, layer):
        for rule in dense.layer_rules(architecture, layer):
            parts = tuple(replace(part, name=part.name.replace(".mlp.", ".ffn.")) for part in rule.parts)
            yield replace(rule, parts=parts)

    FAMILY = replace(
        qwen2.FAMILY,
        model_type="my_family",                   # of its config.json
        architecture_class="MyFamilyForCausalLM",  # in its config.json under "architectures"
        config_like="qwen2",                      # the transformers config whose defaults apply
        layer_rules=lambda architecture, layer: tuple(layer_rules(architecture, layer)),
    )

``megarl convert selftest --family-file my_family.py`` checks the family (``converters.selftest``); every
other command takes the same option. The file runs only when a user names it: nothing in a checkpoint can run
it.
"""

from __future__ import annotations

from pathlib import Path

from converters.errors import ConversionError
from converters.families import register_family
from converters.families.base import Family
from converters.mapping.rules import forget_rules
from converters.python_file import PythonFileError, module_of_file


def load_family_file(path: Path) -> Family:
    """Run a Python file, register its family, and return it.

    Raises:
        ConversionError: the file cannot be read, raises, or has no valid ``FAMILY``.
    """
    try:
        module = module_of_file(path)
    except PythonFileError as error:
        raise ConversionError(
            f"{path} {error}", "correct the file, which must define FAMILY; python FILE shows where it fails"
        ) from error
    family = getattr(module, "FAMILY", None)
    if not isinstance(family, Family):
        raise ConversionError(
            f"{path} defines FAMILY = {family!r}", "define FAMILY as a converters.families.base.Family"
        )
    register_family(family)
    # Rules are cached by architecture; a family that is registered again may have other rules.
    forget_rules()
    return family
