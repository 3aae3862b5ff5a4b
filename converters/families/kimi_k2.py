"""Kimi-K2: DeepSeek-V3 with a ``model_type`` that transformers does not know. The code next to its weights is
not needed."""

from __future__ import annotations

from dataclasses import replace

from converters.families import deepseek_v3

FAMILY = replace(deepseek_v3.FAMILY, model_type="kimi_k2", config_like="deepseek_v3")
