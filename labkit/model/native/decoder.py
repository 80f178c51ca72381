"""A decoder whose stack of layers is one call of the native kernels, on packed weights.

    fast = accelerate(load_model(), "int4")    # a recipe, or a format with a kernel
    fast = accelerate(quantized)               # a quantized model, in its own formats
    generate(fast, "...")                      # as any Decoder, with float32 logits

`accelerate` packs every matrix for the native kernels (`NativePack`) and adds the stack
in one call. One resident copy of the weights serves decode, batches and prefill. Over a
contiguous cache, or one in INT8 (`cache="int8"`, half the bytes), the whole forward
pass is one call. Over any other cache the layers run one by one through its contract,
on the same matrices. The plain `Decoder` is the oracle; `dequantized` makes the one
with these weights.

Exactness: weights are the format's own numbers. Integer formats round each 32
activations to 127 steps (KL to float32 of the same weights is about 0.004 on the
default model). bf16 weights meet float32 activations, so only the order of sums
differs; but a CPU with AVX512-BF16 rounds activations to bfloat16, and logits are then
0.02 to 0.07 from those of `dequantized`. Rows of a batch, chunks of a prefill and the
number of threads change no bit. The cache is bfloat16 unless asked: at 4,096 tokens it
takes as many bytes as all INT4 weights. When it loses: without a compiler
(`unsupported_reason`), and against a GPU.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from labkit.cache.contiguous import ContiguousCache
from labkit.cache.contract import in_dtype
from labkit.errors import BadRequest
from labkit.formats.tensor import quantize
from labkit.kernels.native import build as native
from labkit.kernels.native.structures import Layer, Model
from labkit.model.decoder import Decoder, last_real
from labkit.model.native.parts import (
    Quantizer,
    formats_of,
    pack_into,
    unsupported_formats,
    unsupported_reason,
)
from labkit.model.native.step import PHASES, Tokens, step_of
from labkit.quant.linear import QuantizedEmbedding, QuantizedLinear

__all__ = ["NativeDecoder", "accelerate", "unsupported_reason"]


def accelerate(
    model: Decoder,
    recipe: str | None = None,
    *,
    kv_dtype: torch.dtype = torch.bfloat16,
    quantizer: Quantizer | None = None,
    consume: bool = False,
) -> NativeDecoder:
    """Return `model` on the native kernels, packed in the formats of a recipe ("int4"
    by default).

    A quantized model keeps its own formats. `quantizer(name, weight, format)` replaces
    rounding to nearest. `consume` empties the model matrix by matrix, so two copies
    never exist. Raises BadRequest with the reason if the model, a format or this
    machine is not supported.
    """
    recipe, formats = formats_of(model, recipe)
    reason = unsupported_formats(formats.values()) or unsupported_reason(model.config)
    if reason is not None:
        raise BadRequest(reason)
    if kv_dtype not in (torch.float32, torch.bfloat16):
        raise BadRequest(f"The native attention reads float32 or bfloat16 caches, not {kv_dtype}.")
    fast = NativeDecoder(model, recipe, kv_dtype)
    rounding = quantizer or (lambda name, weight, format: quantize(weight, format))
    pack_into(fast, model, formats, rounding, consume)
    fast.describe()
    return fast.eval().requires_grad_(False)


class NativeDecoder(Decoder):
    """Made by `accelerate`: a Decoder with a `recipe` and an `instruction_set`."""

    kernels = "native"

    def __init__(self, model: Decoder, recipe: str, kv_dtype: torch.dtype):
        with torch.device("meta"):
            super().__init__(model.config)
        self.recipe, self.kv_dtype = recipe, kv_dtype
        self.spent: ctypes.Array | None = None  # where `spending` gathers seconds
        self.tokenizer, self.source = model.tokenizer, model.source
        self.name, self.revision = model.name, model.revision

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of caches made for it; activations and logits are float32."""
        return self.kv_dtype

    def describe(self) -> None:
        """Set the structures that the C++ side reads: addresses of these tensors."""
        c: Any = self.config
        stack: Any = self  # its modules, whose types nn.Module does not know
        address = lambda norm: None if norm is None else norm.weight.data_ptr()  # noqa: E731
        layers = []
        for layer in stack.layers:
            attention, mlp = layer.attention, layer.mlp
            matrices = (attention.qkv, attention.o, mlp.gate_up, mlp.down)
            norms = (layer.attn_norm, layer.mlp_norm, attention.q_norm, attention.k_norm)
            layers.append(Layer(*(m.weight.struct for m in matrices), *map(address, norms)))
        self._layers = (Layer * c.num_layers)(*layers)
        vocabulary = self.head.out_features
        sizes = (c.num_layers, c.hidden_size, c.num_heads, c.num_kv_heads, c.head_dim)
        self._model = Model(
            ctypes.addressof(self._layers),
            stack.embed_tokens.weight.struct,
            stack.head.weight.struct,
            *(address(stack.norm), None, None),  # cos and sin: see `_rotations`
            *(*sizes, c.intermediate_size, vocabulary, c.norm_eps),
        )
        self._cos = self._sin = torch.empty(0, 0)

    @property
    def instruction_set(self) -> str:
        return str(native.library().instruction_set)

    def dequantized(self) -> Decoder:
        """Return the plain float32 decoder with exactly these weights: the oracle."""
        plain = Decoder(self.config)
        with torch.no_grad():
            target: Any
            module: Any
            for name, module in self.named_modules():
                if isinstance(module, QuantizedLinear | QuantizedEmbedding):
                    target = plain.get_submodule(name)
                    target.weight = nn.Parameter(module.weight.unpacked())
                    if getattr(target, "bias", None) is not None:  # the product with zeros
                        target.bias.copy_(module(torch.zeros(1, target.in_features))[0])
                elif isinstance(module, nn.RMSNorm):
                    target = plain.get_submodule(name)
                    target.weight.copy_(module.weight)
        plain.tokenizer, plain.name, plain.revision = self.tokenizer, self.name, self.revision
        return plain.eval().requires_grad_(False)

    @contextmanager
    def spending(self) -> Iterator[dict[str, float]]:
        """Collect the seconds of each phase; the dictionary is filled at the end."""
        seconds: dict[str, float] = {}
        self.spent = spent = (ctypes.c_double * len(PHASES))()
        try:
            yield seconds
        finally:
            seconds |= zip(PHASES, spent)
            self.spent = None

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> NativeDecoder:
        """`.to(dtype)` changes nothing. Raises BadRequest for another device."""
        device = fn(torch.empty(0)).device
        if device.type != "cpu":
            raise BadRequest(
                f"A native decoder runs on the CPU and cannot move to {device}; "
                "load the plain model there."
            )
        return self

    def forward(
        self,
        tokens: Tensor,
        cache=None,
        counts: Sequence[int] | None = None,
        last_only: bool = False,
        return_hidden: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """As Decoder.forward, in float32; one call gives zeros for padding."""
        if not self._in_one_call(tokens, cache):
            hidden = self.hidden_states(tokens, cache, counts)
            logits = self.head(last_real(hidden, counts) if last_only else hidden)
            return (logits, hidden) if return_hidden else logits
        (B, T), c = tokens.shape, self.config
        rows = tokens.tolist()
        ids = [token for row in rows for token in row]
        if min(ids) < 0 or max(ids) >= c.vocab_size:
            raise BadRequest(
                f"Token ids from {min(ids)} to {max(ids)} were given; this vocabulary has "
                f"0 to {c.vocab_size - 1}."
            )
        if cache is None:
            cache = ContiguousCache(c.kv_shape, batch=B, capacity=T, dtype=self.kv_dtype)
        starts = cache.lengths
        cache.advance(T, counts)
        self._rotations(cache.length)
        make = torch.empty if counts is None else torch.zeros
        logits = make(B, 1 if last_only else T, self.head.out_features)
        real = [T] * B if counts is None else counts
        row = [b for b in range(B) for _ in range(real[b])]
        position = [starts[b] + t for b in range(B) for t in range(real[b])]
        if last_only:
            at = [b if t == real[b] - 1 else -1 for b in range(B) for t in range(real[b])]
        else:
            at = [b * T + t for b in range(B) for t in range(real[b])]
        if counts is not None:
            ids = [token for b in range(B) for token in rows[b][: counts[b]]]
        packed = torch.empty(len(ids), c.hidden_size) if return_hidden else None
        step, _arrays = step_of(cache, Tokens(ids, row, position, at), logits, packed, self.spent)
        if native.library().lk_forward(ctypes.byref(self._model), ctypes.byref(step)):
            raise MemoryError(f"There is no memory for the activations of {len(ids)} tokens.")
        if packed is None:
            return logits
        if counts is None:
            return logits, packed.view(B, T, -1)
        hidden = torch.zeros(B, T, c.hidden_size)
        hidden[row, [t for b in range(B) for t in range(real[b])]] = packed
        return logits, hidden

    def hidden_states(
        self, tokens: Tensor, cache=None, counts: Sequence[int] | None = None
    ) -> Tensor:
        """Run layer by layer, for caches that the one call cannot read."""
        if cache is not None:
            cache = in_dtype(cache, torch.float32)
        return super().hidden_states(tokens, cache, counts)

    def _in_one_call(self, tokens: Tensor, cache) -> bool:
        if tokens.dim() != 2 or tokens.numel() == 0:
            return False  # the plain path raises
        return cache is None or (cache.in_memory() is not None and cache.batch == tokens.shape[0])

    def _rotations(self, length: int) -> None:
        """Make cos and sin of positions 0 to `length` [positions, D/2], by doubling."""
        if self._cos.shape[0] > length:
            return
        size, half = max(512, 1 << length.bit_length()), self.config.head_dim // 2
        with torch.inference_mode(False):
            # cos and sin [1, 1, S, D], of which the second half repeats the first
            both = self.rotary(torch.arange(size)[None], (size - 1,), torch.float32)
        self._cos, self._sin = (t[0, 0, :, half:].contiguous() for t in both)
        self._model.cos, self._model.sin = self._cos.data_ptr(), self._sin.data_ptr()
