"""The parity fuzzer: it compares random models, layouts, batches and losses on real backends with one process
of plain transformers."""
