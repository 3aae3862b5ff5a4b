"""Throughput of a run: FLOPs of a model, peak FLOP/s of devices, and model FLOP utilisation (MFU) of a
step."""
