"""Define the structures that Python passes to the C++ kernels."""

from ctypes import Structure, c_float, c_int32, c_int64, c_void_p


def _fields(kind: type, names: str) -> list[tuple[str, type]]:
    return [(name, kind) for name in names.split()]


class Matrix(Structure):
    _fields_ = [
        *_fields(c_void_p, "blocks scale bias"),
        *_fields(c_int32, "rows cols groups kind per pair"),
    ]


class Layer(Structure):
    _fields_ = [
        *_fields(Matrix, "qkv o gate_up down"),
        *_fields(c_void_p, "attn_norm mlp_norm q_norm k_norm"),
    ]


class Model(Structure):
    _fields_ = [
        ("layers", c_void_p),
        *_fields(Matrix, "embed head"),
        *_fields(c_void_p, "norm cos sin"),
        *_fields(c_int32, "L E H K D I V"),
        ("eps", c_float),
    ]


class Step(Structure):
    _fields_ = [
        *_fields(c_void_p, "ids row position logits_at window keys values scales"),
        *_fields(c_void_p, "logits hidden spent"),
        *_fields(c_int32, "N slots kv rounded threads"),
    ]


class Attention(Structure):
    """One call of `attend` in table_attention.cpp."""

    _fields_ = [
        *_fields(c_void_p, "q out keys key_scale key_minimum values value_scale value_minimum"),
        *_fields(c_void_p, "tables starts counts"),
        *_fields(c_int64, "B K G T D size width window sinks kind threads"),
    ]
