"""Fixtures for tests of prefixes: tokens whose keys and values are known numbers."""

import pytest
import torch


def _numbers(tokens):
    """Return keys of tokens [1, K, T, D]: token t at position p has the key 1000 p + t."""
    keys = torch.tensor([1000.0 * place + token for place, token in enumerate(tokens)])
    return keys[None, None, :, None].expand(1, 2, len(tokens), 8)


def _compute(view, tokens, documents=None):
    """Act as a request: look up, compute the rest, store. Return the number of tokens found."""
    lease = view.lookup(tokens)
    cache, found = lease.cache, lease.length
    assert cache.lengths == (found,) and found < len(tokens)
    assert _content(cache) == _numbers(tokens)[0, 0, :found, 0].tolist()
    cache.advance(len(tokens) - found)
    for layer in range(2):
        cache.append(layer, _numbers(tokens)[:, :, found:], -_numbers(tokens)[:, :, found:])
    view.keep(lease, cache, 0, tokens, documents)
    cache.rewind(0)
    return found


def _content(cache):
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
