"""Number formats of the KV cache, as data: what one stored number costs, scales and tail included.

A plain format costs its bits. A quantised one adds a scale (and a minimum or zero point) to each group:
along the channels of one token ("token"), or along the tokens of one channel ("channel"), which needs
whole blocks of tokens. `tail` newest tokens, and those that do not fill a block yet, stay in 16 bits.
    bytes = held * D * bits / 8 + groups * (scale_bits + zero_bits) / 8
When it loses: short contexts (all tail), and small groups, whose scales cost as much as the codes save.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from labkit.errors import BadRequest


@dataclass(frozen=True)
class Part:
    """How keys, or values, are stored. `group` None: one group for the whole axis of a token and head."""

    bits: int
    axis: str | None = None          # None: no scale. "token": groups lie inside one token. "channel": along tokens
    group: int | None = None
    scale_bits: int = 0
    zero_bits: int = 0

    def bytes(self, width: int, heads: int, tokens: int) -> Fraction:
        """`tokens` vectors of `width` numbers in each of `heads` heads; codes are padded to whole bytes per vector."""
        codes = -(-width * self.bits // 8) * heads * tokens
        if self.axis is None:
            groups = 0
        elif self.axis == "token":
            groups = -(-width // (self.group or width)) * heads * tokens if width else 0
        else:
            groups = -(-tokens // self.group) * width * heads
        return Fraction(codes) + Fraction(groups * (self.scale_bits + self.zero_bits), 8)


@dataclass(frozen=True)
class KVFormat:
    name: str
    keys: Part
    values: Part
    tail: int = 0                    # newest tokens kept in `tail_bits`
    tail_bits: int = 16

    @property
    def block(self) -> int:
        """Tokens that are packed together (1 where each token stands for itself)."""
        return max(part.group if part.axis == "channel" else 1 for part in (self.keys, self.values))

    def packed_tokens(self, tokens: int) -> int:
        """How many of `tokens` are quantised: whole blocks, and never the newest `tail`."""
        return max(0, tokens - self.tail) // self.block * self.block

    def vectors(self, width: int, heads: int, tokens: int, keys: bool = True) -> Fraction:
        """Bytes of `tokens` key (or value) vectors of `width` numbers in each of `heads` heads."""
        packed = self.packed_tokens(tokens)
        part = self.keys if keys else self.values
        return part.bytes(width, heads, packed) + Fraction((tokens - packed) * width * heads * self.tail_bits, 8)

    def bytes_per_value(self, width: int) -> float:
        """Mean over keys and values, scales included, past the tail."""
        both = self.keys.bytes(width, 1, self.block) + self.values.bytes(width, 1, self.block)
        return float(both / (2 * self.block * width))


def _plain(name: str, bits: int) -> KVFormat:
    return KVFormat(name, Part(bits), Part(bits))


def _both(name: str, part: Part, **tail) -> KVFormat:
    return KVFormat(name, part, part, **tail)


_INT8_TOKEN = Part(8, "token", None, scale_bits=32)

KV_FORMATS: dict[str, KVFormat] = {f.name: f for f in (
    _plain("fp32", 32), _plain("bf16", 16), _plain("fp16", 16), _plain("fp8", 8),
    _plain("bits8", 8), _plain("bits4", 4),                               # codes alone: what a paper quotes
    _both("int8_token", _INT8_TOKEN),                                     # one float32 scale per token and head
    _both("int8_g32", Part(8, "token", 32, scale_bits=16)),               # GGUF's Q8_0
    _both("int4_g32", Part(4, "token", 32, scale_bits=16)),               # GGUF's Q4_0
    KVFormat("int4_kivi", Part(4, "channel", 64, 16, 16), Part(4, "token", None, 16, 16), tail=64),
)}
ALIASES = {"int8": "int8_token", "int4": "int4_kivi", "float32": "fp32", "bfloat16": "bf16", "float16": "fp16",
           "half": "fp16", "q8_0": "int8_g32", "q4_0": "int4_g32", "fp8_e4m3": "fp8"}


def get_kv_format(name: str | KVFormat) -> KVFormat:
    if isinstance(name, KVFormat):
        return name
    found = KV_FORMATS.get(ALIASES.get(name, name))
    if found is None:
        known = ", ".join(sorted([*KV_FORMATS, "int8", "int4"]))
        raise BadRequest(f"KV format {name!r} is not known; choose one of {known}.")
    return found
