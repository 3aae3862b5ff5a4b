"""Throughput: floating-point operations of a model, peak rates of devices, and what a step reached of
them."""
