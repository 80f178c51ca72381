"""Number formats of the KV cache, as data: what one stored number costs, scales and tail included.

A plain format costs its bits. A quantised one adds a scale (and a minimum) to each group: along the channels of one
token ("token"), along `group` tokens of one channel ("channel"), or over all heads of `group` tokens ("tensor"); the
last two need whole blocks of tokens. Of the newest tokens at most `tail` stay in 16 bits; where one more would not fit,
the oldest block of them is packed. "_prerope" behind a name: keys are turned back before they are quantised.
    bytes = held * D * bits / 8 + groups * (scale_bits + zero_bits) / 8
When it loses: short contexts (all tail), and small groups, whose scales cost as much as the codes save.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction

from labkit.errors import BadRequest, whole_number

PREROPE = "_prerope"


@dataclass(frozen=True)
class Part:
    """How keys, or values, are stored. `group` None: one group for the whole axis of a token and head.

    `zero_bits` is the width of a float minimum (0: symmetric). `code` is "int", "fp8" (e4m3) or "nvfp4" (e2m1 under
    e4m3 scales, and one more float32 for every 32 tokens of a sequence: the streaming form of NVFP4's tensor scale).
    """

    bits: int
    axis: str | None = None          # None: no scale. "token", "channel", "tensor": what shares a scale
    group: int | None = None
    scale_bits: int = 0
    zero_bits: int = 0
    code: str = "int"

    def __post_init__(self):
        whole_number(self.bits, "bits", 1)
        if self.group is not None:
            whole_number(self.group, "group", 1)
        if self.axis is None:
            if (self.group, self.scale_bits, self.zero_bits, self.code) != (None, 0, 0, "int"):
                raise BadRequest("A part without an axis is a plain number; give it bits alone, or an axis that shares a scale.")
            return
        if self.axis not in ("token", "channel", "tensor") or (self.axis != "token" and self.group is None):
            raise BadRequest(f"A scale is shared along {self.axis!r} by a group of {self.group}; give token, or channel or tensor "
                             "with a number of tokens.")
        allowed = {"int": (range(1 if self.zero_bits else 2, 9), (16, 32), (0, 16, 32)), "fp8": ((8,), (16, 32), (0,)),
                   "nvfp4": ((4,), (8,), (0,))}.get(self.code)
        if allowed is None or (self.code == "nvfp4" and self.axis != "token"):
            raise BadRequest(f"Codes are {self.code!r} along {self.axis}; give int, fp8, or nvfp4 (along a token).")
        for value, these, what in zip((self.bits, self.scale_bits, self.zero_bits), allowed, ("codes", "scales", "minima")):
            if value not in these:
                raise BadRequest(f"The {what} of {self.code} have {value} bits; give {' or '.join(map(str, these))}.")

    @property
    def block(self) -> int:
        """Tokens that are packed together (1 where each token stands for itself)."""
        if self.code == "nvfp4":
            return 32
        return self.group if self.axis in ("channel", "tensor") else 1

    def bytes(self, width: int, heads: int, tokens: int) -> Fraction:
        """`tokens` vectors of `width` numbers in each of `heads` heads; codes are padded to whole bytes per vector."""
        codes = -(-width * self.bits // 8) * heads * tokens
        blocks = -(-tokens // self.block)
        groups = {None: 0, "channel": blocks * width * heads, "tensor": blocks}.get(self.axis)
        if groups is None:
            groups = -(-width // (self.group or width)) * heads * tokens if width else 0
        bits = groups * (self.scale_bits + self.zero_bits) + (32 * blocks if self.code == "nvfp4" else 0)
        return Fraction(codes) + Fraction(bits, 8)


@dataclass(frozen=True)
class KVFormat:
    name: str
    keys: Part
    values: Part
    tail: int = 0                    # at most so many of the newest tokens stay in `tail_bits`
    tail_bits: int = 16
    before_rope: bool = False

    def __post_init__(self):
        whole_number(self.tail, "tail", 0)
        if (self.keys.axis is None) != (self.values.axis is None):
            raise BadRequest("Keys or values alone are quantised; give both an axis, or neither.")
        if self.block % self.keys.block or self.block % self.values.block:
            raise BadRequest(f"Keys are packed by {self.keys.block} tokens and values by {self.values.block}; one must be a whole "
                             "number of times the other.")
        if self.tail < self.block - 1:
            raise BadRequest(f"A tail of {self.tail} tokens cannot gather a block of {self.block}; give at least "
                             f"{self.block - 1}.")

    @property
    def block(self) -> int:
        """Tokens that are packed together (1 where each token stands for itself)."""
        return max(self.keys.block, self.values.block)

    @property
    def packed(self) -> bool:
        """Whether it has scales, and is more than a dtype."""
        return self.keys.axis is not None

    def packed_tokens(self, tokens: int) -> int:
        """How many of `tokens` are quantised: whole blocks, as few as leave at most `tail`."""
        return -(-max(0, tokens - self.tail) // self.block) * self.block

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


def _token(bits: int) -> Part:
    return Part(bits, "token", None, 16, 16)      # a bfloat16 scale and minimum per token and head


def _channel(bits: int) -> Part:
    return Part(bits, "channel", 32, 16, 16)      # the same per channel and 32 tokens


KV_FORMATS: dict[str, KVFormat] = {f.name: f for f in (
    _plain("fp32", 32), _plain("bf16", 16), _plain("fp16", 16),
    _plain("bits8", 8), _plain("bits4", 4),                               # codes alone: what a paper quotes
    _both("int8_token", _token(8)),
    _both("int8_token_sym", Part(8, "token", None, scale_bits=32)),       # one float32 scale instead
    _both("int8_g32", Part(8, "token", 32, scale_bits=16)),               # the layout of GGUF's Q8_0
    _both("int4_g32", Part(4, "token", 32, scale_bits=16)),               # the layout of GGUF's Q4_0
    KVFormat("int4_kivi", _channel(4), _token(4), tail=64),
    KVFormat("int2_kivi", _channel(2), _token(2), tail=64),
    _both("int4_token", _token(4), tail=64),
    _both("int2_token", _token(2), tail=64),
    KVFormat("int4_tensor", Part(4, "tensor", 32, 16, 16), _token(4), tail=64),
    _both("fp8_e4m3", Part(8, "token", None, scale_bits=32, code="fp8")),
    _both("nvfp4", Part(4, "token", 16, scale_bits=8, code="nvfp4"), tail=64),
)}
ALIASES = {"int8": "int8_token", "int4": "int4_kivi", "int2": "int2_kivi", "fp8": "fp8_e4m3", "float32": "fp32",
           "bfloat16": "bf16", "float16": "fp16", "half": "fp16", "q8_0": "int8_g32", "q4_0": "int4_g32"}


def get_kv_format(name: str | KVFormat) -> KVFormat:
    if isinstance(name, KVFormat):
        return name
    plain = str(name).removesuffix(PREROPE)
    found = KV_FORMATS.get(ALIASES.get(plain, plain))
    if found is None or (plain != name and not found.packed):
        known = ", ".join(sorted([*KV_FORMATS, "int8", "int4", "int2"]))
        raise BadRequest(f"KV format {name!r} is not known; choose one of {known}, a quantised one also with {PREROPE}.")
    return found if plain == name else replace(found, name=found.name + PREROPE, before_rope=True)
