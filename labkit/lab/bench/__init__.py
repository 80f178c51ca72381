"""Benchmarks: one file per bench, one harness; arms are compared by ratio."""
