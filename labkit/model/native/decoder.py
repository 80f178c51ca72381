"""Run the layers of a decoder in one call of the native kernels, on packed weights.

    fast = accelerate(load_model(), "int4")    # a recipe, or a format with a kernel
    fast = accelerate(quantized)               # a quantized model keeps its formats
    generate(fast, "...")                      # like any Decoder, with float32 logits

`accelerate` packs every matrix for the native kernels (`NativePack`). Decode, batches and
prefill use the same copy of the weights. With a contiguous cache, or an INT8 cache
(`cache="int8"`, half the bytes), the whole forward pass is one call. With any other cache,
the layers run one by one on the same matrices. The plain `Decoder` is the reference, and
`dequantized` returns it with the same weights.

Exactness: the weights are exactly those of the format. Integer formats round the
activations, in groups of 32, to 127 steps. This gives a KL divergence of about 0.004 on the
default model. For bf16 weights, activations are float32 and only the order of sums
differs. A CPU with AVX512-BF16 rounds them to bfloat16; its logits differ from those of
`dequantized` by 0.02 to 0.07. The results do not depend on the number of rows in a batch, on
the chunks of a prefill or on the number of threads. The cache is bfloat16 by default. At
4,096 tokens it takes as many bytes as all INT4 weights.

When it loses: without a compiler (`unsupported_reason`), and against a GPU.
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
from labkit.formats.tensor import round_to_nearest
from labkit.kernels.native import build as native
from labkit.kernels.native.structures import Layer, Model
from labkit.kernels.packed_weight import PackedWeight
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
    """Return a decoder with the weights of `model` that runs on the native kernels.

    recipe: the formats of the weights ("int4" by default). A quantized model keeps its
        formats and takes no recipe.
    kv_dtype: the dtype of its caches, float32 or bfloat16.
    quantizer: a function of name, weight and format that replaces rounding to nearest.
    consume: empty `model` matrix by matrix, so that memory contains one copy only.

    Raises BadRequest if the model, a format or this machine is not supported.
    """
    recipe, formats = formats_of(model, recipe)
    reason = unsupported_formats(formats.values()) or unsupported_reason(model.config)
    if reason is not None:
        raise BadRequest(reason)
    if kv_dtype not in (torch.float32, torch.bfloat16):
        raise BadRequest(f"kv_dtype is {kv_dtype}; give torch.float32 or torch.bfloat16.")
    fast = NativeDecoder(model, recipe, kv_dtype)
    rounding = quantizer or (lambda name, weight, format: round_to_nearest(weight, format))
    pack_into(fast, model, formats, rounding, consume)
    fast.describe()
    return fast.eval().requires_grad_(False)


class NativeDecoder(Decoder):
    """A decoder on the native kernels; `accelerate` makes it."""

    kernels = "native"

    def __init__(self, model: Decoder, recipe: str, kv_dtype: torch.dtype):
        with torch.device("meta"):
            super().__init__(model.config)
        self.recipe, self.kv_dtype = recipe, kv_dtype
        self.spent: ctypes.Array | None = None  # the seconds per phase, inside `spending`
        self.tokenizer, self.source = model.tokenizer, model.source
        self.name, self.revision = model.name, model.revision

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of its caches. Activations and logits are float32."""
        return self.kv_dtype

    def describe(self) -> None:
        """Set the structures that the C++ code reads, with the addresses of the weights."""
        c: Any = self.config
        stack: Any = self  # for mypy, which does not know the types of its modules
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
        """The instruction set for which the kernels were compiled."""
        return str(native.library().instruction_set)

    def dequantized(self) -> Decoder:
        """Return a plain float32 decoder with exactly these weights."""
        plain = Decoder(self.config)
        with torch.no_grad():
            module: Any
            for name, module in self.named_modules():
                if not isinstance(module, QuantizedLinear | QuantizedEmbedding | nn.RMSNorm):
                    continue
                target: Any = plain.get_submodule(name)
                weight: Any = module.weight
                weight = weight.unpacked() if isinstance(weight, PackedWeight) else weight.clone()
                target.weight = nn.Parameter(weight)
                if getattr(target, "bias", None) is not None:  # the product with zeros
                    target.bias.copy_(module(torch.zeros(1, target.in_features))[0])
        plain.tokenizer, plain.name, plain.revision = self.tokenizer, self.name, self.revision
        return plain.eval().requires_grad_(False)

    @contextmanager
    def spending(self) -> Iterator[dict[str, float]]:
        """Measure the seconds per phase; they are in the dictionary after the block."""
        seconds: dict[str, float] = {}
        self.spent = spent = (ctypes.c_double * len(PHASES))()
        try:
            yield seconds
        finally:
            seconds |= zip(PHASES, spent)
            self.spent = None

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> NativeDecoder:
        """Keep the weights: `.to(dtype)` does nothing. Raises BadRequest for another device."""
        device = fn(torch.empty(0)).device
        if device.type != "cpu":
            raise BadRequest(f"A native decoder runs on the CPU; load the plain model on {device}.")
        return self

    def forward(
        self,
        tokens: Tensor,
        cache=None,
        counts: Sequence[int] | None = None,
        last_only: bool = False,
        return_hidden: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Return float32 logits, as `Decoder.forward`.

        Raises BadRequest for token ids outside the vocabulary.
        """
        if not self._in_one_call(tokens, cache):
            hidden = self.hidden_states(tokens, cache, counts)
            logits = self.head(last_real(hidden, counts) if last_only else hidden)
            return (logits, hidden) if return_hidden else logits
        (B, T), c = tokens.shape, self.config
        rows = tokens.tolist()
        least, most = min(map(min, rows)), max(map(max, rows))
        if least < 0 or most >= c.vocab_size:
            last = c.vocab_size - 1
            raise BadRequest(
                f"The token ids are {least} to {most}; this vocabulary has 0 to {last}."
            )
        if cache is None:
            cache = ContiguousCache(c.kv_shape, batch=B, capacity=T, dtype=self.kv_dtype)
        starts = cache.lengths
        cache.advance(T, counts)
        self._rotations(cache.length)
        make = torch.empty if counts is None else torch.zeros
        logits = make(B, 1 if last_only else T, self.head.out_features)
        real = [T] * B if counts is None else counts
        places = [(b, t) for b in range(B) for t in range(real[b])]
        if last_only:
            logits_at = [b if t == real[b] - 1 else -1 for b, t in places]
        else:
            logits_at = [b * T + t for b, t in places]
        batch_rows = [b for b, _ in places]
        positions = [starts[b] + t for b, t in places]
        ids = [rows[b][t] for b, t in places]
        packed = torch.empty(len(ids), c.hidden_size) if return_hidden else None
        given = Tokens(ids, batch_rows, positions, logits_at)
        step, _arrays = step_of(cache, given, logits, packed, self.spent)
        if native.library().lk_forward(ctypes.byref(self._model), ctypes.byref(step)):
            raise MemoryError(f"There is too little memory for activations of {len(ids)} tokens.")
        if packed is None:
            return logits
        if counts is None:
            return logits, packed.view(B, T, -1)
        hidden = torch.zeros(B, T, c.hidden_size)
        hidden[batch_rows, [t for _, t in places]] = packed
        return logits, hidden

    def hidden_states(
        self, tokens: Tensor, cache=None, counts: Sequence[int] | None = None
    ) -> Tensor:
        """Return the vectors after the final norm, computed layer by layer.

        This also works with caches that the native kernels cannot read.
        """
        if cache is not None:
            cache = in_dtype(cache, torch.float32)
        return super().hidden_states(tokens, cache, counts)

    def _in_one_call(self, tokens: Tensor, cache) -> bool:
        if tokens.dim() != 2 or tokens.numel() == 0:
            return False  # the plain path raises the error
        return cache is None or (cache.in_memory() is not None and cache.batch == tokens.shape[0])

    def _rotations(self, length: int) -> None:
        """Compute cos and sin [positions, D/2] up to position `length`, if they are missing."""
        if self._cos.shape[0] > length:
            return
        size, half = max(512, 1 << length.bit_length()), self.config.head_dim // 2
        with torch.inference_mode(False):
            # cos and sin [1, 1, S, D]; the second half repeats the first
            both = self.rotary(torch.arange(size)[None], (size - 1,), torch.float32)
        self._cos, self._sin = (t[0, 0, :, half:].contiguous() for t in both)
        self._model.cos, self._model.sin = self._cos.data_ptr(), self._sin.data_ptr()
