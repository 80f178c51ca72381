"""Compute the bytes of a model's KV cache: the formula, layer by layer.

Each layer stores, for each token that it keeps, K keys and K values of D numbers:

    bytes = 2 * K * D * bytes per number * tokens kept

K is the number of KV heads (not of query heads), and D is `head_dim` of the config. A
*window* limits the tokens kept. *MLA* stores one latent and one rotary part per token
instead of heads. A layer that *shares* another layer's cache stores nothing. A *format*
adds scales and a tail of unquantized tokens. The result is exact. Rounding up to whole
pages is optional. Sources: GQA arXiv 2305.13245; MLA arXiv 2405.04434; KIVI (int4 with
a tail) arXiv 2402.02750.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

from labkit.errors import BadRequest, OrNone, Whole, check_fields, whole_number
from labkit.plan.kv_formats import KVFormat, get_kv_format


@dataclass(frozen=True)
class LayerKV:
    """What one layer stores: K heads of D numbers, or (MLA) one latent and one rotary part.

    `window`: the layer attends to the last `window` tokens, including the newest, and
    to the first `sinks` tokens (None: to all tokens). `shared_with`: the layer whose
    cache this layer reads; it then has no cache of its own.
    """

    num_kv_heads: int
    head_dim: int
    window: int | None = None
    sinks: int = 0
    latent_dim: int | None = None
    rope_dim: int = 0
    shared_with: int | None = None

    def __post_init__(self):
        least = Whole(1 if self.latent_dim is None else 0)
        check_fields(self, num_kv_heads=least, head_dim=least, window=OrNone(Whole(1)))
        check_fields(self, sinks=Whole(0), rope_dim=Whole(0))

    def stored_tokens(self, tokens: int) -> int:
        """Return how many of `tokens` tokens are stored: all, or `window` and `sinks`."""
        return tokens if self.window is None else min(tokens, self.window + self.sinks)

    def paged_tokens(self, tokens: int, page: int) -> int:
        """Return the number of token slots in the pages of the stored tokens.

        A window often lies in one page more than it could fill.
        """
        if self.window is None or tokens <= self.window + self.sinks:
            return -(-tokens // page) * page
        recent = range((tokens - self.window) // page, (tokens - 1) // page + 1)
        return len({*recent, *range(-(-self.sinks // page))}) * page

    def bytes(self, tokens: int, kv_format: KVFormat) -> Fraction:
        """Return the bytes of `tokens` stored tokens of one sequence."""
        if self.latent_dim is not None:
            widths = (self.latent_dim, self.rope_dim)
            return sum((kv_format.vectors(width, 1, tokens) for width in widths), Fraction(0))
        keys = kv_format.vectors(self.head_dim, self.num_kv_heads, tokens, keys=True)
        return keys + kv_format.vectors(self.head_dim, self.num_kv_heads, tokens, keys=False)


@dataclass(frozen=True)
class KVShape:
    """The cache of a whole model: one LayerKV per layer."""

    layers: tuple[LayerKV, ...]

    def __post_init__(self):
        object.__setattr__(self, "layers", tuple(self.layers))
        for i, source in enumerate(self.home):
            if source not in self.own:
                raise BadRequest(
                    f"Layer {i} reads layer {source}; give a layer with its own cache."
                )

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @cached_property
    def home(self) -> tuple[int, ...]:
        """The layer whose cache each layer reads: itself, or `shared_with`."""
        pairs = ((i, layer.shared_with) for i, layer in enumerate(self.layers))
        return tuple(i if source is None else source for i, source in pairs)

    @cached_property
    def own(self) -> tuple[int, ...]:
        """The layers that have a cache of their own."""
        return tuple(i for i, layer in enumerate(self.layers) if layer.shared_with is None)

    @classmethod
    def uniform(
        cls, num_layers: int, num_kv_heads: int, head_dim: int, window: int | None = None
    ) -> KVShape:
        """Return the shape of a model with equal layers."""
        return cls((LayerKV(num_kv_heads, head_dim, window),) * num_layers)


def kv_bytes_per_token(shape: KVShape, kv_format: str | KVFormat = "bf16") -> int | float:
    """Return the bytes that one more token adds once all windows are full.

    A format that packs blocks of tokens grows in steps; the result is the mean over a
    block.
    """
    kv_format = get_kv_format(kv_format)
    start, total = kv_format.tail + kv_format.block, Fraction(0)
    for layer in (shape.layers[i] for i in shape.own):
        if layer.window is None:
            after = layer.bytes(start + kv_format.block, kv_format)
            total += after - layer.bytes(start, kv_format)
    return _number(total / kv_format.block)


def kv_bytes(
    shape: KVShape,
    tokens: int,
    sequences: int = 1,
    kv_format: str | KVFormat = "bf16",
    page: int | None = None,
) -> int | float:
    """Return the bytes of `sequences` sequences of `tokens` tokens each.

    `page`: round up to whole pages of this many tokens (None: do not round).
    """
    whole_number(tokens, "tokens", 0)
    whole_number(sequences, "sequences", 0)
    if page is not None:
        whole_number(page, "page", 1)
    kv_format, total = get_kv_format(kv_format), Fraction(0)
    for layer in (shape.layers[i] for i in shape.own):
        stored = layer.stored_tokens(tokens) if page is None else layer.paged_tokens(tokens, page)
        total += layer.bytes(stored, kv_format)
    return _number(total * sequences)


def _number(value: Fraction) -> int | float:
    return int(value) if value.denominator == 1 else float(value)
