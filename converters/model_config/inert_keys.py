"""Config keys of transformers that affect neither logits nor training, and can be ignored by a conversion."""

from __future__ import annotations

_BOOKKEEPING = frozenset(
    {
        "_attn_implementation",
        "_commit_hash",
        "_name_or_path",
        "attn_implementation",
        "chunk_size_feed_forward",
        "commit_hash",
        "finetuning_task",
        "gradient_checkpointing",
        "name_or_path",
        "output_attentions",
        "output_hidden_states",
        "return_dict",
        "task_specific_params",
        "torchscript",
        "transformers.js_config",
        "transformers_version",
        "unsloth_fixed",
        "unsloth_version",
        "use_bfloat16",
        "use_cache",
    }
)
_LOADING = frozenset({"dtype", "torch_dtype"})
_LABELS = frozenset({"id2label", "label2id", "num_labels", "problem_type"})
_TOKENS = frozenset(
    {
        "bos_token_id",
        "decoder_start_token_id",
        "eos_token_id",
        "pad_token_id",
        "prefix",
        "sep_token_id",
        "tokenizer_class",
    }
)
_GENERATION = frozenset(
    {
        "bad_words_ids",
        "begin_suppress_tokens",
        "diversity_penalty",
        "do_sample",
        "early_stopping",
        "encoder_no_repeat_ngram_size",
        "exponential_decay_length_penalty",
        "forced_bos_token_id",
        "forced_eos_token_id",
        "length_penalty",
        "max_length",
        "max_new_tokens",
        "min_length",
        "no_repeat_ngram_size",
        "num_beam_groups",
        "num_beams",
        "num_return_sequences",
        "output_scores",
        "remove_invalid_values",
        "repetition_penalty",
        "return_dict_in_generate",
        "suppress_tokens",
        "temperature",
        "top_k",
        "top_p",
        "typical_p",
    }
)

SPEAKING_KEYS = _LOADING | _LABELS | _TOKENS | _GENERATION
"""Keys that affect how a model is used: loading dtype, special tokens, labels, generation defaults."""

INERT_KEYS = _BOOKKEEPING | SPEAKING_KEYS
"""``SPEAKING_KEYS``, and keys about versions, paths and output formats."""
