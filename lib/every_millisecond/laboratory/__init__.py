"""Experiments that a lesson or the ladder runs on the library's parts: workloads, benches, explanations."""
