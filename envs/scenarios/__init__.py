"""Scenarios: workload, hardware, disturbances and budgets of a simulated training, and frozen splits of them."""
