"""The number formats of the KV cache as data: the bytes of a number, its scales, and a tail.

A plain format has a fixed number of bits per number. A quantized format also has a
scale (and perhaps a minimum) for each group of numbers. `axis` says which numbers form
a group:

    token      numbers along the channels of one token
    channel    `group` tokens of one channel
    tensor     all heads of `group` tokens

The formats with axis channel or tensor pack whole blocks of tokens. The newest tokens,
up to `tail`, stay in 16 bits. If one more token does not fit, the oldest block of them
is packed. The ending "_prerope" means that keys are quantized without their rotation.

    bytes = tokens * D * bits / 8 + groups * (scale_bits + zero_bits) / 8

When it loses: for short contexts, which lie completely in the tail, and for small
groups, whose scales need as many bytes as the codes save.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction

from labkit.errors import BadRequest, OneOf, OrNone, Whole, check_fields
from labkit.plan.units import SHORT_NAMES

PREROPE = "_prerope"


@dataclass(frozen=True)
class Part:
    """How keys, or values, are stored.

    `axis`: which numbers share a scale (None: there are no scales). `group`: the size
    of a group (None: all channels of a token and head). `zero_bits`: the bits of a
    float minimum (0: symmetric). `code`: "int", "fp8" (e4m3) or "nvfp4" (e2m1 codes,
    e4m3 scales, and one float32 scale per 32 tokens of a sequence).
    """

    bits: int
    axis: str | None = None
    group: int | None = None
    scale_bits: int = 0
    zero_bits: int = 0
    code: str = "int"

    def __post_init__(self):
        check_fields(self, bits=Whole(1), group=OrNone(Whole(1)), code=OneOf(*_CODES))
        if self.axis is None:
            check_fields(self, group=OneOf(None), code=OneOf("int"))
            check_fields(self, scale_bits=OneOf(0), zero_bits=OneOf(0))
            return
        bits, scales, minima, axes = _CODES[self.code]
        rules = {"bits": OneOf(*bits), "scale_bits": OneOf(*scales), "zero_bits": OneOf(*minima)}
        check_fields(self, axis=OneOf(*axes), **rules)
        if self.code == "int" and not self.zero_bits:
            check_fields(self, bits=Whole(2, 8))  # a symmetric code of one bit has a single value
        if self.axis != "token":
            check_fields(self, group=Whole(1))

    @property
    def block(self) -> int:
        """The number of tokens that are packed together; 1 if each is packed alone."""
        if self.code == "nvfp4":
            return 32
        return 1 if self.axis in (None, "token") else self.group or 1

    def bytes(self, width: int, heads: int, tokens: int) -> Fraction:
        """Return the bytes of `tokens` vectors of `width` numbers in each of `heads` heads.

        The codes of each vector are padded to whole bytes.
        """
        codes = -(-width * self.bits // 8) * heads * tokens
        blocks, groups = -(-tokens // self.block), 0
        if self.axis == "token" and width:
            groups = -(-width // (self.group or width)) * heads * tokens
        elif self.axis == "channel":
            groups = blocks * width * heads
        elif self.axis == "tensor":
            groups = blocks
        bits = groups * (self.scale_bits + self.zero_bits)
        return codes + Fraction(bits + (32 * blocks if self.code == "nvfp4" else 0), 8)


_AXES = ("token", "channel", "tensor")
_CODES = {  # code -> allowed bits of numbers, of scales and of minima, and allowed axes
    "int": (range(1, 9), (16, 32), (0, 16, 32), _AXES),
    "fp8": ((8,), (16, 32), (0,), _AXES),
    "nvfp4": ((4,), (8,), (0,), ("token",)),
}


@dataclass(frozen=True)
class KVFormat:
    """How keys and values are stored; the newest tokens, up to `tail`, have `tail_bits` bits."""

    name: str
    keys: Part
    values: Part
    tail: int = 0
    tail_bits: int = 16
    before_rope: bool = False

    def __post_init__(self):
        if (self.keys.axis is None) != (self.values.axis is None):
            raise BadRequest("Only keys or only values have an axis; give both one, or neither.")
        blocks = self.keys.block, self.values.block
        if max(blocks) % min(blocks):
            raise BadRequest(
                f"Keys are packed by {blocks[0]} tokens and values by {blocks[1]}; give blocks "
                "of which one is a multiple of the other."
            )
        check_fields(self, tail=Whole(self.block - 1))

    @property
    def block(self) -> int:
        """The number of tokens that are packed together; 1 if each is packed alone."""
        return max(self.keys.block, self.values.block)

    @property
    def packed(self) -> bool:
        """True for a format with scales, False for a plain dtype."""
        return self.keys.axis is not None

    def packed_tokens(self, tokens: int) -> int:
        """Return how many of `tokens` tokens are quantized.

        This is the smallest number of whole blocks that leaves no more than `tail`
        tokens.
        """
        return -(-max(0, tokens - self.tail) // self.block) * self.block

    def vectors(self, width: int, heads: int, tokens: int, keys: bool = True) -> Fraction:
        """Return the bytes of `tokens` tokens of keys, or of values, in `heads` heads of `width`."""
        packed, part = self.packed_tokens(tokens), self.keys if keys else self.values
        tail = (tokens - packed) * width * heads * self.tail_bits
        return part.bytes(width, heads, packed) + Fraction(tail, 8)

    def bytes_per_value(self, width: int) -> float:
        """Return the mean bytes of a packed number of keys and values, with scales."""
        both = self.keys.bytes(width, 1, self.block) + self.values.bytes(width, 1, self.block)
        return float(both / (2 * self.block * width))


# bfloat16 scale and minimum, per token and head, and per channel and 32 tokens.
_TOKEN = {bits: Part(bits, "token", None, 16, 16) for bits in (2, 4, 8)}
_CHANNEL = {bits: Part(bits, "channel", 32, 16, 16) for bits in (2, 4)}
_SAME = {  # name -> how both keys and values are stored, and the tail
    "fp32": (Part(32), 0),
    "bf16": (Part(16), 0),
    "fp16": (Part(16), 0),
    "bits8": (Part(8), 0),
    "bits4": (Part(4), 0),  # without scales, as papers quote it
    "int8_token": (_TOKEN[8], 0),
    "int8_token_sym": (Part(8, "token", None, scale_bits=32), 0),  # a float32 scale, no minimum
    "int8_g32": (Part(8, "token", 32, scale_bits=16), 0),  # the layout of GGUF's Q8_0
    "int4_g32": (Part(4, "token", 32, scale_bits=16), 0),  # the layout of GGUF's Q4_0
    "int4_token": (_TOKEN[4], 64),
    "int2_token": (_TOKEN[2], 64),
    "fp8_e4m3": (Part(8, "token", None, scale_bits=32, code="fp8"), 0),
    "nvfp4": (Part(4, "token", 16, scale_bits=8, code="nvfp4"), 64),
}
KV_FORMATS = {name: KVFormat(name, part, part, tail) for name, (part, tail) in _SAME.items()} | {
    "int4_kivi": KVFormat("int4_kivi", _CHANNEL[4], _TOKEN[4], 64),
    "int2_kivi": KVFormat("int2_kivi", _CHANNEL[2], _TOKEN[2], 64),
    "int4_tensor": KVFormat("int4_tensor", Part(4, "tensor", 32, 16, 16), _TOKEN[4], 64),
}
ALIASES = SHORT_NAMES | {"half": "fp16", "q8_0": "int8_g32", "q4_0": "int4_g32"}
ALIASES |= {"int8": "int8_token", "int4": "int4_kivi", "int2": "int2_kivi", "fp8": "fp8_e4m3"}


def get_kv_format(name: str | KVFormat) -> KVFormat:
    """Return a format by its name. Raises BadRequest for a name that is not known."""
    if isinstance(name, KVFormat):
        return name
    plain = str(name).removesuffix(PREROPE)
    kv_format = KV_FORMATS.get(ALIASES.get(plain, plain))
    if kv_format is None or (plain != name and not kv_format.packed):
        known = ", ".join(sorted([*KV_FORMATS, "int8", "int4", "int2"]))
        raise BadRequest(
            f"KV format {name!r} is not known; choose one of {known}. Quantized formats can "
            f"have the ending {PREROPE}."
        )
    if plain == name:
        return kv_format
    return replace(kv_format, name=kv_format.name + PREROPE, before_rope=True)
