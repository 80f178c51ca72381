"""What every cache is tested with: a driver that feeds tokens whose keys and values are known by number."""

import pytest
import torch

from labkit.kernels.reference import attention


class Oracle:
    """Rows as plain lists of (key, value) per layer; attention by the reference over each row alone."""

    def __init__(self, shape, batch, heads):
        self.shape, self.heads = shape, heads
        self.rows = [[] for _ in range(batch)]  # row -> tokens -> layers -> (key [K, D], value [K, D])

    def lengths(self):
        return tuple(len(row) for row in self.rows)

    def rewind(self, lengths):
        self.rows = [row[:keep] for row, keep in zip(self.rows, lengths)]

    def select(self, rows):
        self.rows = [list(self.rows[row]) for row in rows]

    def attend(self, layer, row, queries, positions):
        held, spec = self.rows[row], self.shape.layers[layer]
        keys = torch.stack([token[layer][0] for token in held], 1)[None]
        values = torch.stack([token[layer][1] for token in held], 1)[None]
        return attention(queries[None], keys, values, positions, torch.arange(len(held)), spec.window, spec.sinks)[0]


def _feed(cache, oracle, num_tokens, counts=None, generator=None):
    """One forward pass with random keys, values and queries on both sides; asserts equality on all real tokens."""
    batch, shape, H = cache.batch, cache.shape, oracle.heads
    real = counts or [num_tokens] * batch
    starts = oracle.lengths()
    positions = cache.advance(num_tokens, counts)
    tokens = [[[] for _ in range(num_tokens)] for _ in range(batch)]
    passes = []
    for spec in shape.layers:
        size = (batch, spec.num_kv_heads, num_tokens, spec.head_dim)
        keys, values = torch.randn(size, generator=generator), torch.randn(size, generator=generator)
        queries = torch.randn(batch, H, num_tokens, spec.head_dim, generator=generator)
        passes.append((keys, values, queries))
        for b in range(batch):
            for t in range(num_tokens):
                tokens[b][t].append((keys[b, :, t], values[b, :, t]))
    for b in range(batch):
        oracle.rows[b].extend(tokens[b][: real[b]])
        assert positions[b, : real[b]].tolist() == list(range(starts[b], starts[b] + real[b]))
    assert cache.lengths == oracle.lengths()
    for layer, (keys, values, queries) in enumerate(passes):
        cache.append(layer, keys, values)
        out = cache.attend(layer, queries)
        assert out.shape == queries.shape
        for b in range(batch):
            if real[b]:
                expected = oracle.attend(layer, b, queries[b, :, : real[b]], positions[b, : real[b]])
                torch.testing.assert_close(out[b, :, : real[b]], expected, atol=2e-5, rtol=2e-5)


@pytest.fixture
def make_oracle():
    return Oracle


@pytest.fixture
def feed():
    return _feed


def _numbers(tokens):
    """Keys of these tokens [1, K, T, D]: token t at place p is 1000 p + t, so a row shows what it holds."""
    found = torch.tensor([1000.0 * place + token for place, token in enumerate(tokens)])
    return found[None, None, :, None].expand(1, 2, len(tokens), 8)


def _compute(view, tokens, documents=None):
    """What a request does: look up, compute the rest, keep. Returns how many tokens it found."""
    lease = view.lookup(tokens)
    cache, found = lease.cache, lease.length
    assert cache.lengths == (found,) and found < len(tokens)
    assert _held(cache) == _numbers(tokens)[0, 0, :found, 0].tolist()
    cache.advance(len(tokens) - found)
    for layer in range(2):
        cache.append(layer, _numbers(tokens)[:, :, found:], -_numbers(tokens)[:, :, found:])
    view.keep(lease, cache, 0, tokens, documents)
    cache.rewind(0)
    return found


def _held(cache):
    if cache.length == 0:
        return []
    keys, values = cache.dense(1)
    assert torch.equal(keys, -values)
    return keys[0, 0, :, 0].tolist()


@pytest.fixture
def numbers():
    return _numbers


@pytest.fixture
def compute():
    return _compute
