"""A decoder whose stack of layers runs as one call of the native kernels, on packed weights.

    fast = accelerate(load_model(), "int4")        recipes bf16, int8, int4, or a format that `kind_of` knows
    fast = accelerate(load_model("small.safetensors"))    as `labkit quantize` wrote it, in its own formats
    generate(fast, "...")                          as with any Decoder: same call, same caches, float32 logits

One resident copy of the weights serves decode, batches and prefill. Over a contiguous cache, or one in INT8 (`cache="int8"`:
half the bytes), the whole forward is one call; over any other (paged, INT4, windowed ...) the layers run one by one
through its contract, on the same matrices. The plain `Decoder` is the oracle; `dequantized` makes the one with these weights.

Exactness: weights are the format's own numbers. Integer formats round each 32 activations to 127 steps (KL to float32 of
the same weights about 0.004 on the default model). bf16 weights meet float32 activations: only the order of sums
differs, but where a CPU's AVX512-BF16 rounds activations to bfloat16, logits are 0.02 to 0.07 from those of `dequantized`.
Rows of a batch, chunks of a prefill and numbers of threads change no bit. The cache is bfloat16 unless asked: at 4,096
tokens it is as many bytes as all INT4 weights. It loses where there is no compiler (`why_not`), and on a GPU.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from labkit.cache.contiguous import ContiguousCache
from labkit.cache.in_dtype import in_dtype
from labkit.errors import BadRequest
from labkit.formats import quantize
from labkit.formats.tensor import QuantizedTensor
from labkit.kernels import native
from labkit.kernels.native_pack import Layer, Model
from labkit.model.decoder import Decoder, last_real
from labkit.model.native_parts import NativeLinear, formats_of, lacking, pack_into, why_not
from labkit.model.native_step import PHASES, finished, kv_kind, step_of


def accelerate(
    model: Decoder,
    recipe: str | None = None,
    *,
    kv_dtype: torch.dtype = torch.bfloat16,
    quantizer: Callable[[str, Tensor, str], QuantizedTensor] | None = None,
    consume: bool = False,
) -> NativeDecoder:
    """`model`'s weights, packed in a recipe's formats ("int4" where none is given); a quantised model keeps its own.

    `quantizer(name, weight, format)` replaces round-to-nearest. `consume` empties the model matrix by matrix, so that two
    copies never exist. Raises BadRequest with the reason."""
    recipe, formats = formats_of(model, recipe)
    reason = lacking(formats.values()) or why_not(model.config)
    if reason is not None:
        raise BadRequest(reason)
    if kv_dtype not in (torch.float32, torch.bfloat16):
        raise BadRequest(f"The native attention reads a cache in float32 or bfloat16, not {kv_dtype}: choose one of those.")
    quantizer = quantizer or (lambda name, weight, format: quantize(weight, format))
    return NativeDecoder(model, recipe, formats, kv_dtype, quantizer, consume)


class NativeDecoder(Decoder):
    """Made by `accelerate`. `recipe`, `instruction_set`; everything else as a Decoder."""

    def __init__(self, model: Decoder, recipe: str, formats, kv_dtype: torch.dtype, quantizer, consume: bool):
        with torch.device("meta"):
            super().__init__(model.config)
        self.recipe, self.kv_dtype = recipe, kv_dtype
        self.spent: ctypes.Array | None = None  # where `spending` gathers seconds
        self.tokenizer, self.source = model.tokenizer, model.source
        self.name, self.revision = model.name, model.revision
        pack_into(self, model, formats, quantizer, consume)
        self._describe()
        self.eval().requires_grad_(False)

    @property
    def dtype(self) -> torch.dtype:
        """Of the caches made for it; activations and logits are float32."""
        return self.kv_dtype

    def _describe(self) -> None:
        """The structures that the C++ side reads; they hold addresses, so what they point to is kept here."""
        c = self.config
        pointer = lambda norm: None if norm is None else norm.weight.data_ptr()  # noqa: E731
        self._layers = (Layer * c.num_layers)(*(
            Layer(layer.attention.qkv.matrix.struct, layer.attention.o.matrix.struct, layer.mlp.gate_up.matrix.struct,
                  layer.mlp.down.matrix.struct, pointer(layer.attn_norm), pointer(layer.mlp_norm),
                  pointer(layer.attention.q_norm), pointer(layer.attention.k_norm))
            for layer in self.layers))  # fmt: skip
        self._model = Model(ctypes.addressof(self._layers), self.embed_tokens.matrix.struct, self.head.matrix.struct,
                            pointer(self.norm), None, None, c.num_layers, c.hidden_size, c.num_heads, c.num_kv_heads,
                            c.head_dim, c.intermediate_size, self.head.matrix.shape[0], c.norm_eps)  # fmt: skip
        self._cos = self._sin = torch.empty(0, 0)

    @property
    def instruction_set(self) -> str:
        return native.library().instruction_set

    def dequantized(self) -> Decoder:
        """The plain float32 decoder with exactly the numbers held here: the oracle of tests and of a KL."""
        plain = Decoder(self.config)
        with torch.no_grad():
            for name, module in self.named_modules():
                if isinstance(module, NativeLinear):
                    plain.get_submodule(name).weight = nn.Parameter(module.matrix.unpacked())
                    if getattr(plain.get_submodule(name), "bias", None) is not None:
                        plain.get_submodule(name).bias.copy_(self.bias_of(module))
                elif isinstance(module, nn.RMSNorm):
                    plain.get_submodule(name).weight.copy_(module.weight)
        plain.tokenizer, plain.name, plain.revision = self.tokenizer, self.name, self.revision
        return plain.eval().requires_grad_(False)

    def bias_of(self, module: NativeLinear) -> Tensor:
        """The bias in the order of the rows: what the matrix gives for zeros."""
        return module(torch.zeros(1, module.matrix.shape[1]))[0]

    @contextmanager
    def spending(self) -> Iterator[dict[str, float]]:
        """`with model.spending() as spent:` seconds in each phase of the forward passes inside, filled at the end."""
        self.spent, seconds = (ctypes.c_double * len(PHASES))(), {}
        try:
            yield seconds
        finally:
            seconds |= zip(PHASES, self.spent)
            self.spent = None

    def _apply(self, fn, recurse=True):
        """Formats are what they are and the kernels know addresses: `.to(dtype)` changes nothing, another device is refused."""
        moved = fn(torch.empty(0))
        if moved.device.type != "cpu":
            raise BadRequest(f"A native decoder lives on the CPU and cannot move to {moved.device}: load the plain model there.")
        return self

    def forward(
        self,
        tokens: Tensor,
        cache=None,
        counts: Sequence[int] | None = None,
        last_only: bool = False,
        return_hidden: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """As Decoder.forward; logits float32. Logits of padding are zeros in one call."""
        if not self._in_one_call(tokens, cache):
            hidden = self.hidden_states(tokens, cache, counts)
            logits = self.head(last_real(hidden, counts) if last_only else hidden)
            return (logits, hidden) if return_hidden else logits
        B, T = tokens.shape
        rows = tokens.tolist()
        flat = [token for row in rows for token in row]
        if min(flat) < 0 or max(flat) >= self.config.vocab_size:
            raise BadRequest(
                f"token ids from {min(flat)} to {max(flat)} were given: this vocabulary holds 0 to {self.config.vocab_size - 1}."
            )
        if cache is None:
            cache = ContiguousCache(self.config.kv_shape, batch=B, capacity=T, dtype=self.kv_dtype)
        starts = cache.lengths
        cache.advance(T, counts)
        self._turns(cache.length)
        logits = torch.empty(B, 1 if last_only else T, self.head.matrix.shape[0])
        hidden = torch.empty(B, T, self.config.hidden_size) if return_hidden else None
        if counts is None:
            index = None
            row = [b for b in range(B) for _ in range(T)]
            position = [start + t for start in starts for t in range(T)]
            at = [b if t == T - 1 else -1 for b in range(B) for t in range(T)] if last_only else range(B * T)
        else:
            index = [(b, t) for b in range(B) for t in range(counts[b])]
            flat = [rows[b][t] for b, t in index]
            row = [b for b, _ in index]
            position = [starts[b] + t for b, t in index]
            at = [b if t == counts[b] - 1 else -1 for b, t in index] if last_only else [b * T + t for b, t in index]
            logits.zero_()
        packed = hidden if index is None or hidden is None else torch.empty(len(index), self.config.hidden_size)
        self._call(cache, flat, row, position, at, logits, packed)
        if index is not None and hidden is not None:
            hidden.zero_()
            hidden[[b for b, _ in index], [t for _, t in index]] = packed
        return (logits, hidden) if return_hidden else logits

    def hidden_states(self, tokens: Tensor, cache=None, counts: Sequence[int] | None = None) -> Tensor:
        """Layer by layer, through the cache's contract: for caches that the one call does not read."""
        if cache is not None:
            cache = in_dtype(cache, torch.float32)
        return super().hidden_states(tokens, cache, counts)

    def _in_one_call(self, tokens: Tensor, cache) -> bool:
        if tokens.dim() != 2 or tokens.numel() == 0:
            return False  # refused by the plain path, in its words
        longest = (0 if cache is None else cache.length) + tokens.shape[1]
        rope = self.config.rope
        if rope.kind == "dynamic" and longest > rope.original_positions:
            return False  # frequencies change with the length: no table
        return cache is None or (kv_kind(cache) is not None and cache.batch == tokens.shape[0])

    def _turns(self, length: int) -> None:
        """cos and sin of positions 0 .. length, [positions, D/2], grown by doubling."""
        if self._cos.shape[0] <= length:
            size, half = max(512, 1 << length.bit_length()), self.config.head_dim // 2
            with torch.inference_mode(False):
                cos, sin = self.rotary(torch.arange(size)[None], (size - 1,), torch.float32)  # [1, 1, S, D]
            self._cos, self._sin = cos[0, 0, :, half:].contiguous(), sin[0, 0, :, half:].contiguous()
            self._model.cos, self._model.sin = self._cos.data_ptr(), self._sin.data_ptr()

    def _call(self, cache, ids, row, position, at, logits: Tensor, hidden: Tensor | None) -> None:
        step, _arrays = step_of(cache, ids, row, position, at, logits, hidden, self.spent)
        if native.library().lk_forward(ctypes.byref(self._model), ctypes.byref(step)):
            raise MemoryError(f"No memory for the activations of {len(ids)} tokens.")
        finished(cache)
