"""Benchmarks and the recorded form of their results."""
