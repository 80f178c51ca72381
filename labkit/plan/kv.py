"""How many bytes the KV cache of a model takes: the formula, layer by layer.

Each layer stores, for each token it still holds, K keys and K values of D numbers:
    bytes = 2 * K * D * bytes_per_number * tokens held       (K: KV heads, not query heads; D: stated head_dim)
What changes it: a *window* bounds the tokens held; *MLA* stores one latent and one rotary part per
token and no heads; a layer that *shares* another's cache stores nothing; a *format* adds scales and a tail.
Sources: GQA arXiv 2305.13245; MLA arXiv 2405.04434; KIVI (int4 with a tail) arXiv 2402.02750.
Cost: a sum over the layers. It is exact; what a runtime rounds up (pages, capacity) is named apart.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from labkit.errors import BadRequest, whole_number
from labkit.plan.kv_formats import KVFormat, get_kv_format


@dataclass(frozen=True)
class LayerKV:
    """What one layer stores: K heads of D numbers, or (MLA) one latent and one rotary part.

    `window`: the layer attends to the last `window` tokens only, itself included (None: to all), and
    `sinks` first tokens besides. `shared_with`: the index of the layer whose cache it reads instead of its own.
    """

    num_kv_heads: int
    head_dim: int
    window: int | None = None
    sinks: int = 0
    latent_dim: int | None = None
    rope_dim: int = 0
    shared_with: int | None = None

    def __post_init__(self):
        if self.window is not None and whole_number(self.window, "window") < 1:
            raise BadRequest(f"window is {self.window}; it counts tokens and is at least 1, or None for a full layer.")
        whole_number(self.sinks, "sinks", 0)
        for name in ("num_kv_heads", "head_dim", "rope_dim"):
            whole_number(getattr(self, name), name, 0)
        if self.latent_dim is None and (self.num_kv_heads < 1 or self.head_dim < 1):
            raise BadRequest(f"{self.num_kv_heads} KV heads of {self.head_dim} numbers hold nothing; "
                             "both must be at least 1.")

    def tokens_held(self, tokens: int) -> int:
        """Tokens held after `tokens` were seen; exactly `window` (never one more) once past it."""
        if self.window is None:
            return tokens
        return min(tokens, self.window + self.sinks)

    def tokens_paged(self, tokens: int, page: int) -> int:
        """Token slots of the whole pages that hold them; a window usually straddles one page more than it fills."""
        if self.window is None or tokens <= self.window + self.sinks:
            return -(-tokens // page) * page
        first = tokens - self.window
        pages = set(range(first // page, (tokens - 1) // page + 1)) | set(range(-(-self.sinks // page)))
        return len(pages) * page

    def grows(self) -> bool:
        """Whether one more token, past every window, takes more memory."""
        return self.window is None and self.shared_with is None

    def bytes(self, tokens: int, kv_format: KVFormat) -> Fraction:
        """Bytes for `tokens` tokens *held*, one sequence."""
        if self.latent_dim is not None:
            return kv_format.vectors(self.latent_dim, 1, tokens) + kv_format.vectors(self.rope_dim, 1, tokens)
        return (kv_format.vectors(self.head_dim, self.num_kv_heads, tokens, keys=True)
                + kv_format.vectors(self.head_dim, self.num_kv_heads, tokens, keys=False))


@dataclass(frozen=True)
class KVShape:
    """The cache of a whole model: one LayerKV a layer."""

    layers: tuple[LayerKV, ...]

    def __post_init__(self):
        object.__setattr__(self, "layers", tuple(self.layers))
        for index, layer in enumerate(self.layers):
            source = layer.shared_with
            if source is not None and not (0 <= source < len(self.layers)
                                           and self.layers[source].shared_with is None):
                raise BadRequest(f"layer {index} shares the cache of layer {source}, which must be a layer of "
                                 "this model with a cache of its own.")

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @classmethod
    def uniform(cls, num_layers: int, num_kv_heads: int, head_dim: int, window: int | None = None) -> KVShape:
        return cls((LayerKV(num_kv_heads, head_dim, window),) * num_layers)


def kv_bytes_per_token(shape: KVShape, kv_format: str | KVFormat = "bf16") -> int | float:
    """Growth of the cache by one more token past every window: the sum over the layers that still grow.

    A format that packs whole blocks of tokens grows in steps; this is then the mean over a block.
    """
    kv_format = get_kv_format(kv_format)
    block = kv_format.block
    start = kv_format.tail + block
    per_block = sum((layer.bytes(start + block, kv_format) - layer.bytes(start, kv_format)
                     for layer in shape.layers if layer.grows()), Fraction(0))
    return _number(per_block / block)


def kv_bytes(shape: KVShape, tokens: int, sequences: int = 1, kv_format: str | KVFormat = "bf16",
             page: int | None = None) -> int | float:
    """Bytes of `sequences` sequences of `tokens` tokens each: ideal, or in whole pages of `page` tokens."""
    if whole_number(tokens, "tokens") < 0 or whole_number(sequences, "sequences") < 0:
        raise BadRequest(f"{tokens} tokens in {sequences} sequences cannot be planned; both count from 0 up.")
    if page is not None and page < 1:
        raise BadRequest(f"a page of {page} tokens cannot hold any; give at least 1, or None for the ideal size.")
    kv_format = get_kv_format(kv_format)
    total = Fraction(0)
    for layer in shape.layers:
        if layer.shared_with is None:
            held = layer.tokens_held(tokens) if page is None else layer.tokens_paged(tokens, page)
            total += layer.bytes(held, kv_format)
    return _number(total * sequences)


def _number(value: Fraction) -> int | float:
    return int(value) if value.denominator == 1 else float(value)
