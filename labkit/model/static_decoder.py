"""Decoding in steps of fixed shape: on a GPU one recorded graph a step, with the next token chosen on the device.

At batch 1 a GPU reads the weights of a small model in less time than Python takes to ask for its 600 kernels. A CUDA graph
asks once: the whole step - embedding, layers, head, argmax, and feeding the token and its position back - is recorded
and replayed by one call, so the CPU neither computes nor waits between tokens.

    fast = StaticDecoder(model, batch=1, capacity=2048)
    fast.prefill([prompt]);  fast.run(64);  fast.tokens(first, last)      `labkit.generate.static` is the loop around it

Steps read a `span` of slots: the smallest power of two that holds the longest row, one graph each, so that at most twice
the length is read. On a CPU the same steps run without a graph: slower than the plain decoder, and its test.
When it loses: short answers, since recording takes a few steps for each span.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

import torch
from torch import Tensor
from torch.nn.attention import sdpa_kernel

from labkit.cache.static import StaticCache
from labkit.errors import BadRequest
from labkit.kernels.backends import attention_times, backends
from labkit.model.decoder import Decoder

LEAST_SPAN, WARM_UP = 128, 3


class StaticDecoder:
    """`graphs`: None records them on CUDA and nowhere else. `backend`: a name of `labkit.kernels.backends`, None: measured."""

    def __init__(self, model: Decoder, batch: int = 1, capacity: int = 1024, *, graphs: bool | None = None,
                 backend: str | None = None):  # fmt: skip
        rope = model.config.rope
        if rope.kind == "dynamic" and capacity > rope.original_positions:
            raise BadRequest(f"Steps of fixed shape cannot stretch positions beyond {rope.original_positions}; give that capacity.")
        self.model, self.device = model, model.device
        self.cache = StaticCache(model.config.kv_shape, batch, capacity, model.dtype, self.device)
        self.graphs = self.device.type == "cuda" if graphs is None else graphs
        with torch.inference_mode(False):
            self.token = torch.zeros(batch, 1, dtype=torch.long, device=self.device)
            self.text = torch.zeros(batch, capacity + 1, dtype=torch.long, device=self.device)  # by position
            self.finite = torch.ones((), dtype=torch.bool, device=self.device)
        self.starts = (0,) * batch  # the length of each row's prompt
        self._recorded: dict[int, torch.cuda.CUDAGraph] = {}
        # The table of rotations must exist, and stay where it is, before anything is recorded.
        for rotary in filter(None, (model.rotary, model.local_rotary)):
            rotary(torch.zeros(1, 1, dtype=torch.long, device=self.device), (capacity,), model.dtype)
        self.backend = backend or (self._fastest() if self.device.type == "cuda" else None)

    @torch.inference_mode()
    def prefill(self, prompts: Sequence[Sequence[int]]) -> None:
        """Forget what was, read the prompts (right padded where they differ) and choose each row's first token."""
        if len(prompts) != self.cache.batch or not all(len(prompt) for prompt in prompts):
            raise BadRequest(f"{len(prompts)} prompts were given, or an empty one; this decoder was made for {self.cache.batch} rows.")
        self.cache.rewind(0)
        counts = [len(prompt) for prompt in prompts]
        padded = [list(prompt) + [prompt[-1]] * (max(counts) - len(prompt)) for prompt in prompts]
        tokens = torch.tensor(padded, device=self.device)
        ragged = None if min(counts) == max(counts) else counts
        logits = self.model(tokens, self.cache, ragged, last_only=True)[:, -1]
        self.finite.fill_(True)
        self.starts = self.cache.lengths
        self.cache.at.copy_(torch.tensor(self.cache.lengths, device=self.device))
        self._choose(logits)

    @torch.inference_mode()
    def run(self, steps: int) -> None:
        """So many tokens more in every row. Returns before a GPU has computed them."""
        while steps > 0:
            span = self._span(self.cache.length + 1)
            now = min(steps, span - self.cache.length)  # until a row needs a larger span
            with self._attention(), self.cache.fixed(span):
                replay = self._replay(span)
                for _ in range(now):
                    replay()
            self.cache.count(now)
            steps -= now

    def tokens(self, first: int, last: int) -> list[list[int]]:
        """Generated tokens first .. last - 1 of each row, counted from 0. Waits for the device."""
        index = torch.tensor([[start + i for i in range(first, last)] for start in self.starts], device=self.device)
        found, finite = self.text.gather(1, index).tolist(), bool(self.finite)
        if not finite:
            raise BadRequest("The model's logits contain NaN or infinity; load it in a wider dtype.")
        return found

    def _step(self) -> None:
        logits = self.model(self.token, self.cache, last_only=True)[:, -1]  # [B, V]
        self.cache.at += 1
        self._choose(logits)

    def _choose(self, logits: Tensor) -> None:
        """The most likely token of each row, into the next step's input and the text, all on the device."""
        largest, best = logits.max(-1, keepdim=True)
        self.finite.logical_and_(largest.isfinite().all())
        self.token.copy_(best)
        self.text.scatter_(1, self.cache.at[:, None], best)

    def _span(self, length: int) -> int:
        if length > self.cache.capacity:
            raise BadRequest(f"This decoder holds {self.cache.capacity} tokens a row; make one with a larger capacity.")
        return min(self.cache.capacity, max(LEAST_SPAN, 1 << (length - 1).bit_length()))

    def _attention(self):
        return nullcontext() if self.backend is None else sdpa_kernel(backends()[self.backend])

    def _replay(self, span: int):
        """A function that does one step: itself, or the replay of its recording."""
        if not self.graphs:
            return self._step
        if span not in self._recorded:
            self._recorded[span] = self._record()
        return self._recorded[span].replay

    def _record(self) -> torch.cuda.CUDAGraph:
        """Warm up aside, since libraries set themselves up at first use, then record; what was changed is put back."""
        kept = [(tensor, tensor.clone()) for tensor in (self.token, self.text, self.finite, self.cache.at)]
        aside = torch.cuda.Stream(self.device)
        aside.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(aside):
            for _ in range(WARM_UP):
                self._step()
                self.cache.at.copy_(kept[-1][1])  # the same slot again
        torch.cuda.current_stream(self.device).wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._step()
        for tensor, before in kept:
            tensor.copy_(before)
        return graph

    def _fastest(self) -> str:
        """The attention kernel that is fastest for a step at half the capacity."""
        layer = self.model.config.kv_shape.layers[0]
        queries = torch.zeros(self.cache.batch, self.model.config.num_heads, 1, layer.head_dim, dtype=self.model.dtype, device=self.device)
        with torch.inference_mode(), self.cache.fixed(self._span(max(1, self.cache.capacity // 2))):
            self.cache.advance(1)
            return next(iter(attention_times(lambda: self.cache.attend(0, queries), device=self.device)))
