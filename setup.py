"""The packages of a distribution of megarl. Everything else about it stands in pyproject.toml.

The recipes lie in ``configs`` and are shipped as ``megarl/recipes``, with the rows in the published form of
public sets.
"""

import re
from pathlib import Path

from setuptools import find_packages, setup

RECIPES = {
    "megarl.recipes": "configs",
    "megarl.recipes.base": "configs/base",
    "megarl.recipes.quickstart": "configs/quickstart",
}

# On the page of a package index there are no files beside README.md that its links could lead to.
README = re.sub(
    r"\[([^\]]+)\]\((?!https?://|#)[^)]+\)",
    r"\1",
    (Path(__file__).parent / "README.md").read_text(encoding="utf-8"),
)

setup(
    long_description=README,
    long_description_content_type="text/markdown",
    packages=[*find_packages(include=["megarl", "megarl.*", "converters", "converters.*"]), *RECIPES],
    package_dir=RECIPES,
    package_data={
        "megarl": ["py.typed", "*.pyi"],
        "megarl.config": ["*.json"],
        **{package: ["*.yaml", "*.jsonl"] for package in RECIPES},
    },
)
