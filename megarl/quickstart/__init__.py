"""The quickstart: teach a tiny model arithmetic by reinforcement learning, on a CPU within minutes."""
