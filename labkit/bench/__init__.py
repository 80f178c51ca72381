"""Benchmarks: one file a bench, one shared harness. Arms are interleaved and compared by ratio."""
