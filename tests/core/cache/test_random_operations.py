"""Random operations (feed, step, rewind, select) on every cache, compared with rows stored as lists.

The oracle of a quantized cache applies the rule directly: if a row has more full-precision tokens
than fit into the tail, the oldest whole block is quantized, once. Quantized tokens do not change
afterwards. The oracle of a windowed cache is a band mask.
"""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from labkit.cache import ContiguousCache, KVCache, paged_cache, quantized_cache, windowed_cache
from labkit.cache.quantized.blocks import decode, encode
from labkit.errors import BadRequest
from labkit.kernels.reference import attention
from labkit.plan.kv import KVShape, LayerKV, kv_bytes
from labkit.plan.kv_formats import KVFormat, Part


def with_slack(maker, tokens):
    def make(*sizes, **named):
        cache = maker(*sizes, **named)
        cache.allow_rewind(tokens)
        return cache

    return make


OPERATIONS = st.tuples(
    st.sampled_from(["feed", "feed", "feed", "step", "rewind", "select"]), st.integers(0, 2**32 - 1)
)
UNIFORM = KVShape.uniform(2, 2, 8)
HYBRID = KVShape(
    (
        LayerKV(2, 4, window=5),
        LayerKV(1, 8, window=4, sinks=2),
        LayerKV(4, 4),
        LayerKV(4, 4, shared_with=2),
    )
)
FREQUENCIES = torch.tensor([1.0, 0.3, 0.1, 0.03])


def small(name, keys, values, tail=6):
    return KVFormat(name, keys, values, tail)


CHANNEL, TOKEN = Part(4, "channel", 4, 16, 16), Part(4, "token", None, 16, 16)
FORMATS = {
    "int8": "int8",
    "int8 symmetric": "int8_token_sym",
    "fp8": "fp8",
    "groups": "int4_g32",
    "channels": small("channels", CHANNEL, TOKEN),
    "whole": small("whole", Part(4, "tensor", 3, 16, 16), TOKEN),
    "int2": small("int2", Part(2, "channel", 4, 16, 16), Part(2, "token", 4, 16, 16), 3),
    "tail of tokens": small("tail", TOKEN, TOKEN, 5),
}
KINDS = {
    "contiguous": (lambda: ContiguousCache, UNIFORM, {}),
    "contiguous, windows": (lambda: ContiguousCache, HYBRID, {}),
    "windowed": (windowed_cache, HYBRID, {}),
    "windowed, all layers": (
        lambda: windowed_cache(6, sinks=1),
        UNIFORM,
        {"window": 6, "sinks": 1},
    ),
    "windowed, slack": (
        lambda: with_slack(windowed_cache(4, sinks=2), 5),
        UNIFORM,
        {"window": 4, "sinks": 2, "slack": 5},
    ),
    "paged": (lambda: paged_cache(block=4), UNIFORM, {}),
    "paged, windows": (lambda: paged_cache(block=3), HYBRID, {}),
    **{
        f"paged, {n}": (lambda f=f: paged_cache(block=4, kv_format=f), UNIFORM, {"format": f})
        for n, f in {"int8": "int8", "fp8": "fp8", "groups": "int4_g32"}.items()
    },
    **{
        f"quantized, {n}": (
            lambda f=f: quantized_cache(f),
            HYBRID if n == "channels" else UNIFORM,
            {"format": f},
        )
        for n, f in FORMATS.items()
    },
    "quantized, before RoPE": (
        lambda: quantized_cache(KVFormat("x", CHANNEL, TOKEN, 6, before_rope=True), FREQUENCIES),
        UNIFORM,
        {"format": KVFormat("x", CHANNEL, TOKEN, 6), "frequencies": FREQUENCIES},
    ),
}


def rotated(heads, positions):
    """Rotate heads [K, T, D] by positions, with complex numbers."""
    first, second = heads.double().chunk(2, -1)
    rotation = torch.polar(
        torch.ones(len(positions), 4).double(), positions[:, None].double() * FREQUENCIES.double()
    )
    out = torch.complex(first, second) * rotation
    return torch.cat((out.real, out.imag), -1).float()


class Oracle:
    """Rows of tokens; a token is [key [K, D], value [K, D]] per layer.

    The first `frozen[row]` tokens of a row are quantized.
    """

    def __init__(
        self, shape, batch, capacity, window=None, sinks=0, slack=0, format=None, frequencies=None
    ):
        from labkit.plan.kv_formats import get_kv_format

        self.shape, self.window, self.sinks, self.slack = shape, window, sinks, slack
        self.format, self.frequencies = format and get_kv_format(format), frequencies
        self.rows, self.frozen = [[] for _ in range(batch)], [0] * batch
        self.slots = [
            [{} for _ in shape.layers] for _ in range(batch)
        ]  # windowed: slot -> position last written there

    def band(self, layer):
        return self.shape.layers[layer].window or self.window, self.shape.layers[
            layer
        ].sinks or self.sinks

    def extend(self, row, tokens):
        for token in tokens:
            position = len(self.rows[row])
            self.rows[row].append(token)
            for layer, slots in enumerate(self.slots[row]):
                window, sinks = self.band(layer)
                ring = window and window + self.slack
                slots[
                    position if not ring or position < sinks else sinks + (position - sinks) % ring
                ] = position
        while self.format and len(self.rows[row]) - self.frozen[row] > self.format.tail:
            start, stop = self.frozen[row], self.frozen[row] + self.format.block
            for layer in range(self.shape.num_layers):
                for side, part in enumerate((self.format.keys, self.format.values)):
                    block = torch.stack(
                        [token[layer][side] for token in self.rows[row][start:stop]], 1
                    )  # [K, T, D]
                    at = torch.arange(start, stop)
                    before_rope = side == 0 and self.frequencies is not None
                    block = rotated(block, -at) if before_rope else block
                    block = decode(encode(block[None], part), part, block.shape[-1])[0]
                    block = rotated(block, at) if before_rope else block
                    for i in range(stop - start):
                        self.rows[row][start + i][layer][side] = block[:, i]
            self.frozen[row] = stop

    def may_rewind(self, lengths_to_keep):
        """Return True if the windowed cache still stores all tokens that the next query would see."""
        for row, keep in enumerate(lengths_to_keep):
            for layer, slots in enumerate(self.slots[row]):
                window, sinks = self.band(layer)
                needed = {
                    p for p in range(keep) if window is None or p > keep - window or p < sinks
                }
                if not needed <= set(slots.values()):
                    return False
        return True

    def rewind(self, lengths_to_keep):
        self.rows = [row[:keep] for row, keep in zip(self.rows, lengths_to_keep)]
        self.frozen = [min(frozen, keep) for frozen, keep in zip(self.frozen, lengths_to_keep)]
        self.slots = [
            [{} for _ in layers] if keep == 0 else layers
            for layers, keep in zip(self.slots, lengths_to_keep)
        ]

    def select(self, rows):
        self.rows = [[[list(pair) for pair in token] for token in self.rows[row]] for row in rows]
        self.frozen = [self.frozen[row] for row in rows]
        self.slots = [[dict(slots) for slots in self.slots[row]] for row in rows]

    def attend(self, layer, row, queries, positions):
        home = self.shape.layers[layer].shared_with
        stored = [token[layer if home is None else home] for token in self.rows[row]]
        keys, values = (torch.stack([pair[side] for pair in stored], 1)[None] for side in (0, 1))
        return attention(
            queries[None], keys, values, positions, torch.arange(len(stored)), *self.band(layer)
        )[0]


def feed(cache, oracle, num_tokens, counts, generator):
    real = counts or [num_tokens] * cache.batch
    starts = [len(row) for row in oracle.rows]
    positions = cache.advance(num_tokens, counts)
    for b in range(cache.batch):
        assert positions[b, : real[b]].tolist() == list(range(starts[b], starts[b] + real[b]))
    new = []
    for spec in oracle.shape.layers:
        size = (cache.batch, spec.num_kv_heads, num_tokens, spec.head_dim)
        new.append((torch.randn(size, generator=generator), torch.randn(size, generator=generator)))
    for b in range(cache.batch):
        oracle.extend(b, [[[k[b, :, t], v[b, :, t]] for k, v in new] for t in range(real[b])])
    for layer, (keys, values) in enumerate(new):
        spec = oracle.shape.layers[layer]
        if spec.shared_with is None:
            cache.append(layer, keys, values)
        queries = torch.randn(cache.batch, 4, num_tokens, spec.head_dim, generator=generator)
        out = cache.attend(layer, queries)
        assert out.shape == queries.shape and out.isfinite().all()
        for b in range(cache.batch):
            if real[b]:
                expected = oracle.attend(
                    layer, b, queries[b, :, : real[b]], positions[b, : real[b]]
                )
                near = 2e-5 if oracle.format is None else 1e-4
                if (
                    oracle.frequencies is not None
                ):  # after rotating back in float32, a scale may round to the next 16-bit number
                    near = 5e-3
                torch.testing.assert_close(out[b, :, : real[b]], expected, atol=near, rtol=near)


def run(kind, operations, batch, capacity=40):
    maker, shape, options = KINDS[kind]
    cache, oracle = (
        maker()(shape, batch=batch, capacity=capacity),
        Oracle(shape, batch, capacity, **options),
    )
    for name, seed in operations:
        generator = torch.Generator().manual_seed(seed)
        pick = lambda low, high, g=generator: int(torch.randint(low, high + 1, (), generator=g))  # noqa: E731
        lengths = [len(row) for row in oracle.rows]
        if name in ("feed", "step"):
            tokens = 1 if name == "step" else pick(1, 12)
            counts = None if pick(0, 1) else [pick(0, tokens) for _ in range(cache.batch)]
            real = counts or [tokens] * cache.batch
            if max(real) == 0 or max(map(sum, zip(lengths, real))) > capacity:
                with pytest.raises(BadRequest):
                    cache.advance(tokens, counts)
            else:
                feed(cache, oracle, tokens, counts, generator)
        elif name == "rewind":
            back = pick(0, 3) == 0  # often a few tokens, sometimes any number
            lengths_to_keep = [
                pick(0, length) if back else max(length - pick(0, 4), 0) for length in lengths
            ]
            if not kind.startswith("windowed") or oracle.may_rewind(lengths_to_keep):
                try:
                    cache.rewind(lengths_to_keep)
                    oracle.rewind(lengths_to_keep)
                except BadRequest:  # if layers differ in sinks, a later rewind may raise
                    assert kind.startswith("windowed") and any(
                        layer.sinks for layer in cache.shape.layers
                    )
            else:
                with pytest.raises(BadRequest, match="cannot go back"):
                    cache.rewind(lengths_to_keep)
        else:
            rows = [pick(0, cache.batch - 1) for _ in range(pick(1, 4))]
            cache.select(rows)
            oracle.select(rows)
        assert cache.lengths == tuple(len(row) for row in oracle.rows)
        if kind.startswith("contiguous"):
            check_bytes(cache)


def check_bytes(cache):
    """Compare allocated and used bytes with the formula; a window saves nothing here."""
    everything = KVShape(
        tuple(replace(layer, window=None, sinks=0) for layer in cache.shape.layers)
    )
    assert cache.nbytes() == kv_bytes(everything, cache.slots, cache.batch, kv_format="fp32")
    assert cache.nbytes_used() == sum(
        kv_bytes(everything, length, 1, kv_format="fp32") for length in cache.lengths
    )


@pytest.fixture
def few_slots(monkeypatch):
    monkeypatch.setattr(KVCache, "first_slots", 4)  # so that a short test grows often


@pytest.mark.parametrize("kind", KINDS)
def test_random_operations_equal_rows_stored_as_lists(kind, few_slots):
    @settings(max_examples=6, deadline=None, derandomize=True, database=None)
    @given(st.lists(OPERATIONS, min_size=6, max_size=12), st.integers(1, 3))
    def check(operations, batch):
        run(kind, operations, batch)

    check()


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_thousands_of_random_operations_equal_rows_stored_as_lists(kind, few_slots):
    done = []

    @settings(
        max_examples=120 if kind.startswith("contiguous") else 20,
        deadline=None,
        derandomize=True,
        database=None,
    )
    @given(st.lists(OPERATIONS, min_size=10, max_size=25), st.integers(1, 4))
    def check(operations, batch):
        run(kind, operations, batch)
        done.append(len(operations))

    check()
    assert sum(done) * len(KINDS) >= 5000
