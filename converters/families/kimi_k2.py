"""Kimi-K2: DeepSeek-V3 by another name, which transformers does not know; the code beside its weights is not
needed."""

from __future__ import annotations

from dataclasses import replace

from converters.families import deepseek_v3

FAMILY = replace(deepseek_v3.FAMILY, model_type="kimi_k2", config_like="deepseek_v3")
