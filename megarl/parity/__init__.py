"""The parity fuzzer compares random models, layouts, batches and losses on the training backends with a
reference in plain transformers."""
