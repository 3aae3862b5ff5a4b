"""The parity fuzzer: random models, layouts, batches and losses on real backends against one process of plain
transformers."""
