"""Decode in steps of fixed shape: on a GPU one recorded graph per step.

At batch 1 a GPU reads the weights of a small model in less time than Python takes to
launch its 600 kernels. A CUDA graph launches them at once: the whole step - embedding,
layers, head, argmax, feeding the token and its position back - is recorded and replayed
by one call, so the CPU neither computes nor waits between tokens.

    fast = StaticDecoder(model, batch=1, capacity=2048)
    fast.generate([prompt], max_new_tokens=64)

Steps read a `span` of slots: the smallest power of two that fits the longest row, one
graph each, so at most twice the length is read. On a CPU the same steps run without a
graph, which is slower than the plain decoder and serves as a test. When it loses: short
answers, since recording takes a few steps per span.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from time import perf_counter

import torch
from torch import Tensor
from torch.nn.attention import sdpa_kernel

from labkit.errors import BadRequest
from labkit.generate.row import Completion, Row
from labkit.kernels.device import synchronize
from labkit.lab.cuda.attention_backends import attention_times, backends
from labkit.lab.cuda.static_cache import StaticCache
from labkit.model.decoder import Decoder

LEAST_SPAN, WARM_UP, LOOK = 128, 3, 16


class StaticDecoder:
    """Decode greedily in steps of fixed shape.

    Graphs are recorded on CUDA only. The attention kernel is the fastest one measured.
    """

    def __init__(self, model: Decoder, batch: int = 1, capacity: int = 1024):
        self.model, self.device = model, model.device
        self.graphs = self.device.type == "cuda"
        self.cache = StaticCache(model.config.kv_shape, batch, capacity, model.dtype, self.device)
        new = {"dtype": torch.long, "device": self.device}
        with torch.inference_mode(False):
            self.token = torch.zeros(batch, 1, **new)
            self.text = torch.zeros(batch, capacity + 1, **new)  # by position
            self.finite = torch.ones((), dtype=torch.bool, device=self.device)
        self.starts = (0,) * batch  # the length of each row's prompt
        self._recorded: dict[int, torch.cuda.CUDAGraph] = {}
        # The table of rotations must exist, and stay where it is, before anything is recorded.
        for rotary in filter(None, (model.rotary, model.local_rotary)):
            rotary(torch.zeros(1, 1, **new), (capacity,), model.dtype)
        self.backend = self._fastest() if self.graphs else None

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int = 128,
        end_ids: Sequence[int] | None = None,
        look: int = LOOK,
    ) -> list[Completion]:
        """Continue prompts of token ids greedily, one per row.

        `end_ids` as in `labkit.generate`.

        The device runs ahead, and the tokens are read back once per `look` steps. So a
        row that has ended computes up to `look` - 1 steps for nothing, and the CPU
        waits only once per `look` steps.
        """
        if max_new_tokens < 1 or look < 1:
            raise BadRequest(
                f"max_new_tokens is {max_new_tokens} and look is {look}; give at least 1."
            )
        self._span(max(map(len, prompts), default=0) + max_new_tokens - 1)  # raises if too long
        ends = frozenset(self.model.config.eos_ids if end_ids is None else end_ids)
        rows = [Row(i, tuple(prompt), max_new_tokens) for i, prompt in enumerate(prompts)]
        synchronize(self.device)
        start = perf_counter()
        self.prefill(prompts)
        known, more = 0, 1
        while True:
            new = self.tokens(known, known + more)  # waits for the device
            time_s = perf_counter() - start
            for row, tokens in zip(rows, new):
                for token in tokens:
                    if row.reason is None:
                        row.take(token, time_s, ends)
            if all(row.reason is not None for row in rows):
                return [row.completion(self.model.tokenizer) for row in rows]
            known += more
            more = min(look, max_new_tokens - known)
            self.run(more)

    @torch.inference_mode()
    def prefill(self, prompts: Sequence[Sequence[int]]) -> None:
        """Clear the cache, read the prompts and choose each row's first token."""
        if len(prompts) != self.cache.batch or not all(map(len, prompts)):
            raise BadRequest(
                f"Prompts of {list(map(len, prompts))} tokens were given; give {self.cache.batch} "
                "prompts of at least one token, or make a decoder for another batch."
            )
        self.cache.rewind(0)
        counts = [len(prompt) for prompt in prompts]
        padded = [[*prompt, *[0] * (max(counts) - len(prompt))] for prompt in prompts]
        ragged = None if min(counts) == max(counts) else counts
        tokens = torch.tensor(padded, device=self.device)
        logits = self.model(tokens, self.cache, ragged, last_only=True)[:, -1]
        self.finite.fill_(True)
        self.starts = self.cache.lengths
        self.cache.at.copy_(torch.tensor(self.starts, device=self.device))
        self._choose(logits)

    @torch.inference_mode()
    def run(self, steps: int) -> None:
        """Add `steps` tokens to every row. Returns before a GPU has computed them."""
        while steps > 0:
            span = self._span(self.cache.length + 1)
            now = min(steps, span - self.cache.length)  # until a row needs a larger span
            kernel = (
                nullcontext() if self.backend is None else sdpa_kernel(backends()[self.backend])
            )
            with kernel, self.cache.fixed(span):
                replay = self._replay(span)
                for _ in range(now):
                    replay()
            self.cache.count(now)
            steps -= now

    def tokens(self, first: int, last: int) -> list[list[int]]:
        """Return generated tokens first .. last - 1 of each row, from 0.

        Waits for the device.
        """
        places = [range(start + first, start + last) for start in self.starts]
        tokens = self.text.gather(1, torch.tensor(places, device=self.device)).tolist()
        if not bool(self.finite):
            raise BadRequest("The logits contain NaN or infinity; load the model in a wider dtype.")
        return tokens

    def _step(self) -> None:
        logits = self.model(self.token, self.cache, last_only=True)[:, -1]  # [B, V]
        self.cache.at += 1
        self._choose(logits)

    def _choose(self, logits: Tensor) -> None:
        """Put each row's most likely token into the next input and the text."""
        largest, best = logits.max(-1, keepdim=True)
        self.finite.logical_and_(largest.isfinite().all())
        self.token.copy_(best)
        self.text.scatter_(1, self.cache.at[:, None], best)

    def _span(self, length: int) -> int:
        if length > self.cache.capacity:
            raise BadRequest(
                f"Prompt and answer need {length} slots and this decoder has "
                f"{self.cache.capacity}; make one with a larger capacity."
            )
        return min(self.cache.capacity, max(LEAST_SPAN, 1 << (length - 1).bit_length()))

    def _replay(self, span: int) -> Callable[[], None]:
        """Return a function that runs one step: `_step`, or its recording."""
        if not self.graphs:
            return self._step
        if span not in self._recorded:
            self._recorded[span] = self._record()
        return self._recorded[span].replay

    def _record(self) -> torch.cuda.CUDAGraph:
        """Warm up on another stream (libraries set up at first use); record a step.

        Restores the state that the warm-up changed.
        """
        state = [self.token, self.text, self.finite, self.cache.at]
        before = [tensor.clone() for tensor in state]
        main, side = torch.cuda.current_stream(self.device), torch.cuda.Stream(self.device)
        side.wait_stream(main)
        with torch.cuda.stream(side):
            for _ in range(WARM_UP):
                self._step()
                self.cache.at.copy_(before[-1])  # the same slot again
        main.wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._step()
        for tensor, old in zip(state, before):
            tensor.copy_(old)
        return graph

    def _fastest(self) -> str:
        """Return the fastest attention kernel for a step at half the capacity."""
        config, cache = self.model.config, self.cache
        size = (cache.batch, config.num_heads, 1, config.kv_shape.layers[0].head_dim)
        queries = torch.zeros(*size, dtype=self.model.dtype, device=self.device)
        with torch.inference_mode(), cache.fixed(self._span(max(1, cache.capacity // 2))):
            cache.advance(1)
            return next(iter(attention_times(lambda: cache.attend(0, queries), device=self.device)))
