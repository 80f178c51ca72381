"""What a model takes in memory, from shapes alone: weights, KV cache, run-time overhead, and what fits."""

from labkit.plan.kv import KVShape, LayerKV, kv_bytes, kv_bytes_per_token

__all__ = ["KVShape", "LayerKV", "kv_bytes", "kv_bytes_per_token"]
