"""The quickstart's task: arithmetic problems, a small tokenizer, a tiny Qwen2 and a check by plain
transformers."""
