"""Simulated training: plants, their physics and profiles. Nothing here runs inside a training process."""
