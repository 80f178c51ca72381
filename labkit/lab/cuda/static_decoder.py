"""Decode in steps of fixed shape, which a GPU runs as one recorded graph.

At batch 1, a GPU reads the weights of a small model in less time than Python needs to
launch its 600 kernels. A CUDA graph launches them with one call. The graph has the
whole step: embedding, layers, head, argmax, and writing the token and its position for
the next step. The CPU does not compute or wait between tokens.

    fast = StaticDecoder(model, batch=1, capacity=2048)
    fast.generate([prompt], max_new_tokens=64)

Each step reads a `span` of slots: the smallest power of two that is not below the
length of the longest row, so at most twice this length. Each span has its own graph. On
a CPU the same steps run without a graph; this is slower than the plain decoder and is
for tests. When it loses: short answers, because recording takes the time of a few steps
per span.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from time import perf_counter

import torch
from torch import Tensor
from torch.nn.attention import sdpa_kernel

from labkit.errors import BadRequest, whole_number
from labkit.generate.row import Completion, Row
from labkit.kernels.device import synchronize
from labkit.lab.cuda.attention_backends import attention_times, backends
from labkit.lab.cuda.static_cache import StaticCache
from labkit.model.decoder import Decoder

LEAST_SPAN, WARM_UP, LOOK = 128, 3, 16


class StaticDecoder:
    """Decode greedily in steps of fixed shape.

    It records graphs on CUDA only. There it also measures which attention kernel is the
    fastest, and uses that one.
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
        # A graph records addresses, so make the table of rotations before, and in full length.
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

        `end_ids`: as in `labkit.generate`. `look`: the number of steps after which the
        tokens are copied to the CPU. The CPU waits for the device only then, but a row
        can compute up to `look` - 1 steps after its end.

        Raises BadRequest if the rows do not fit, or if logits are not finite.
        """
        whole_number(max_new_tokens, "max_new_tokens", 1)
        whole_number(look, "look", 1)
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
        """Clear the cache, read the prompts, and choose the first token of each row."""
        if len(prompts) != self.cache.batch or not all(map(len, prompts)):
            raise BadRequest(
                f"The prompts have {list(map(len, prompts))} tokens; give {self.cache.batch} prompts "
                "of at least one token."
            )
        self.cache.rewind(0)
        counts = list(map(len, prompts))
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
        """Add `steps` tokens to every row. On a GPU, return before they are computed."""
        while steps > 0:
            span = self._span(self.cache.length + 1)
            now = min(steps, span - self.cache.length)  # until a row needs a larger span
            kernel = sdpa_kernel(backends()[self.backend]) if self.backend else nullcontext()
            with kernel, self.cache.fixed(span):
                replay = self._replay(span)
                for _ in range(now):
                    replay()
            self.cache.count(now)
            steps -= now

    def tokens(self, first: int, last: int) -> list[list[int]]:
        """Return the generated tokens first .. last - 1 of each row, counted from 0.

        Waits for the device. Raises BadRequest if logits were not finite.
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
        """Write the most likely token of each row into the next input and the text."""
        largest, best = logits.max(-1, keepdim=True)
        self.finite.logical_and_(largest.isfinite().all())
        self.token.copy_(best)
        self.text.scatter_(1, self.cache.at[:, None], best)

    def _span(self, length: int) -> int:
        if length > self.cache.capacity:
            raise BadRequest(
                f"Prompt and answer need {length} slots; make a decoder with more than its "
                f"capacity of {self.cache.capacity}."
            )
        return min(self.cache.capacity, max(LEAST_SPAN, 1 << (length - 1).bit_length()))

    def _replay(self, span: int) -> Callable[[], None]:
        """Return a function that runs one step: `_step`, or the replay of its graph."""
        if not self.graphs:
            return self._step
        if span not in self._recorded:
            self._recorded[span] = self._record()
        return self._recorded[span].replay

    def _record(self) -> torch.cuda.CUDAGraph:
        """Record a step, after a warm-up on another stream.

        Libraries set themselves up at their first use, which must not be recorded. The
        state that the warm-up changes is restored.
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
