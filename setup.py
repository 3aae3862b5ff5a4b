"""The packages of a distribution of megarl. Everything else about it stands in pyproject.toml.

The recipes lie in ``configs`` and are shipped as ``megarl/recipes``, with the rows in the published form of public sets.
"""

from setuptools import find_packages, setup

RECIPES = {"megarl.recipes": "configs", "megarl.recipes.base": "configs/base", "megarl.recipes.quickstart": "configs/quickstart"}

setup(
    packages=[*find_packages(include=["megarl", "megarl.*", "converters", "converters.*"]), *RECIPES],
    package_dir=RECIPES,
    package_data={"megarl": ["py.typed"], **{package: ["*.yaml", "*.jsonl"] for package in RECIPES}},
)
