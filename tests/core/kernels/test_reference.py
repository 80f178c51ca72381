"""Compare the reference with attention in plain loops and with cases computed by hand."""

import math

import pytest
import torch

from labkit.kernels.reference import attention


def by_loops(q, k, v, query_positions, key_positions, window=None, sinks=0, scale=None):
    (B, H, T, D), K = q.shape, k.shape[1]
    out = torch.zeros_like(q)
    for b in range(B):
        for h in range(H):
            for t in range(T):
                head, p = h * K // H, int(query_positions[t])
                seen = [
                    s
                    for s, at in enumerate(key_positions.tolist())
                    if at <= p and (window is None or at > p - window or at < sinks)
                ]
                logits = [
                    float(q[b, h, t] @ k[b, head, s]) * (scale or 1 / math.sqrt(D)) for s in seen
                ]
                weights = [math.exp(x - max(logits)) for x in logits]
                for weight, s in zip(weights, seen):
                    out[b, h, t] += weight / sum(weights) * v[b, head, s]
    return out


@pytest.mark.parametrize(
    ("window", "sinks", "scale"), [(None, 0, None), (3, 0, None), (3, 2, 0.4), (1, 0, None)]
)
def test_equals_attention_written_out_in_loops(window, sinks, scale):
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 6, 4, 8), torch.randn(2, 3, 9, 8), torch.randn(2, 3, 9, 8)
    queries, keys = torch.arange(5, 9), torch.arange(9)
    expected = by_loops(q, k, v, queries, keys, window, sinks, scale)
    scaled = q if scale is None else q * scale * 8**0.5
    torch.testing.assert_close(attention(scaled, k, v, queries, keys, window, sinks), expected)


def test_two_queries_over_five_keys_see_their_history():
    # v is one-hot per key, so the output is the row of attention weights
    q, k, v = torch.zeros(1, 1, 2, 5), torch.zeros(1, 1, 5, 5), torch.eye(5)[None, None]
    weights = attention(q, k, v, torch.tensor([3, 4]), torch.arange(5))[0, 0]
    assert (weights > 0).int().tolist() == [[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (6, 3), (28, 4), (4, 1), (4, 4)])
def test_neighbouring_query_heads_share_a_kv_head(heads, kv_heads):
    v = (
        torch.arange(kv_heads).float()[None, :, None, None].expand(1, kv_heads, 3, 2)
    )  # V is the number of the head
    out = attention(
        torch.randn(1, heads, 1, 2),
        torch.randn(1, kv_heads, 3, 2),
        v,
        torch.tensor([2]),
        torch.arange(3),
    )
    group = heads // kv_heads
    assert out[0, :, 0, 0].round().int().tolist() == [
        head for head in range(kv_heads) for _ in range(group)
    ]


def test_invalid_keys_have_no_influence_even_when_they_are_nan():
    torch.manual_seed(0)
    q, k, v = torch.randn(1, 2, 3, 4), torch.randn(1, 2, 5, 4), torch.randn(1, 2, 5, 4)
    valid = torch.tensor([[True, True, False, True, False]])
    expected = attention(
        q, k[:, :, valid[0]], v[:, :, valid[0]], torch.arange(2, 5), torch.tensor([0, 1, 3])
    )
    k[:, :, ~valid[0]] = v[:, :, ~valid[0]] = float("nan")
    positions = torch.arange(5).where(valid[0], 1 << 40)
    torch.testing.assert_close(attention(q, k, v, torch.arange(2, 5), positions), expected)


def test_a_query_that_sees_nothing_gives_zeros():
    q = torch.randn(1, 1, 1, 4)
    assert attention(q, q, q, torch.tensor([0]), torch.tensor([1])).eq(0).all()


def test_half_precision_is_computed_in_float32():
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 6, 8, dtype=torch.bfloat16) for _ in range(3))
    positions = torch.arange(6)
    out = attention(q, k, v, positions, positions)
    assert out.dtype == torch.bfloat16
    exact = attention(q.double(), k.double(), v.double(), positions, positions)
    torch.testing.assert_close(out, exact.bfloat16(), atol=1e-3, rtol=2**-7)
