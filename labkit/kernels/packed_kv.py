"""Attention over INT8 keys and values from their codes: PyTorch's operators, or a kernel of our own on the CPU.

    int8_scores(q, codes, scale, minimum, out)       q [B, K, R, D] times keys -> out[..., :slots]
    int8_sums(weights, codes, scale, minimum)        weights [B, K, R, slots] times values -> [B, K, R, D]

Both return False or None where the kernel does not serve (no compiler, another device, D no multiple of 16, or
LABKIT_NATIVE=off); the caller then uses the plain way, which is also the oracle. The kernel is built on first use.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from labkit.kernels.one_file import functions_of

SOURCE = Path(__file__).with_name("packed_kv.cpp")


@lru_cache(maxsize=8)
def _typed(functions: ctypes.CDLL) -> ctypes.CDLL:
    for function in (functions.kv_scores, functions.kv_sums):
        function.argtypes = [ctypes.c_void_p] * 5 + [ctypes.c_long] * 6 + [ctypes.c_int]
        function.restype = None
    return functions


def kernel(codes: Tensor) -> ctypes.CDLL | None:
    """The functions where they serve codes like these, else None."""
    if codes.device.type != "cpu" or codes.shape[-1] % 16 or not codes.is_contiguous():
        return None
    functions = functions_of(SOURCE)
    return None if functions is None else _typed(functions)


def int8_scores(q: Tensor, codes: Tensor, scale: Tensor, minimum: Tensor, out: Tensor, slots: int) -> bool:
    """Scores of the first `slots` keys into out [B, K, R, S]; `codes` [B, K, held, D], scales bfloat16 a token."""
    functions = kernel(codes)
    if functions is None:
        return False
    (B, K, R, D), held = q.shape, codes.shape[2]
    q = q.contiguous()
    functions.kv_scores(q.data_ptr(), codes.data_ptr(), scale.data_ptr(), minimum.data_ptr(), out.data_ptr(),
                        B * K, R, D, slots, held, out.shape[-1], torch.get_num_threads())  # fmt: skip
    return True


def int8_sums(weights: Tensor, codes: Tensor, scale: Tensor, minimum: Tensor, slots: int) -> Tensor | None:
    """Weighted sums [B, K, R, D] of the first `slots` values; `weights` [B, K, R, S] may be wider than that."""
    functions = kernel(codes)
    if functions is None:
        return None
    (B, K, R, S), (held, D) = weights.shape, codes.shape[2:]
    out = torch.empty(B, K, R, D)
    functions.kv_sums(weights.data_ptr(), codes.data_ptr(), scale.data_ptr(), minimum.data_ptr(), out.data_ptr(),
                      B * K, R, D, slots, held, S, torch.get_num_threads())  # fmt: skip
    return out
