"""Throughput: floating-point operations of a model, peak rates of devices, and the share of the peak that a
step reached."""
