"""A stored reference: the k likeliest tokens of every distribution, for a model too large to stand in the same run.

    KL(p || q) >= sum over the k of p (log p - log q)  +  P (log P - log Q)        P, Q: what is left outside the k

Merging all other tokens into one can only lower a KL (the data processing inequality), so this is a *lower bound*, and is
called one in every report. With k = 64 it holds nearly all of it where the reference is sure, less where it is not.
Cost: 8 k bytes a token (512 B at k = 64; a whole distribution over 49,152 tokens is 196 kB).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from labkit.assets.whole import save_tensors
from labkit.errors import BadRequest
from labkit.evals.reading import Passage, log_probs, plain_read
from labkit.quant.calibrate import device_of


class TopK:
    """Made by `remember` or `load`. `compare` is what `text.score` asks a stored reference."""

    def __init__(self, about: dict[str, str], values: dict[str, Tensor], tokens: dict[str, Tensor]):
        self.about, self.values, self.tokens = about, values, tokens  # each [t, k] a passage

    @classmethod
    @torch.inference_mode()
    def remember(cls, model, passages: Sequence[Passage], k: int = 64,
                 progress: Callable[[str], object] = lambda line: None) -> TopK:  # fmt: skip
        values, tokens = {}, {}
        for passage in passages:
            given = torch.tensor([passage.tokens], device=device_of(model))
            states, head = plain_read(model, given)
            found = [log_probs(piece, head).topk(k) for piece in states[passage.first - 1 : -1].split(128)]
            values[passage.id] = torch.cat([one.values for one in found]).cpu()
            tokens[passage.id] = torch.cat([one.indices for one in found]).int().cpu()
            progress(passage.id)
        about = {"model": str(model.name), "revision": str(model.revision), "k": str(k)}
        return cls(about, values, tokens)

    def save(self, path: str | Path) -> None:
        held = {f"values/{name}": t for name, t in self.values.items()} | {f"tokens/{n}": t for n, t in self.tokens.items()}
        save_tensors(path, held, self.about)

    @classmethod
    def load(cls, path: str | Path) -> TopK:
        from safetensors import safe_open

        try:
            with safe_open(path, "pt") as file:
                held = {name: file.get_tensor(name) for name in file.keys()}
                about = file.metadata() or {}
        except Exception as reason:  # the Rust library raises its own kind
            raise BadRequest(f"{path} is not a stored reference ({reason}); make one with TopK.remember.") from None
        part = lambda kind: {n.removeprefix(kind): t for n, t in held.items() if n.startswith(kind)}  # noqa: E731
        return cls(about, part("values/"), part("tokens/"))

    def compare(self, passage: Passage, start: int, q: Tensor) -> tuple[float, int]:
        """(lower bound of the KL in nats, tokens with the same first choice) for q [t, V] from the `start`-th scored token."""
        if passage.id not in self.values:
            raise BadRequest(f"The stored reference holds no passage {passage.id}; make it from the same passages.")
        at = slice(start, start + len(q))
        p, tokens = self.values[passage.id][at].to(q.device), self.tokens[passage.id][at].long().to(q.device)
        if len(self.values[passage.id]) != len(passage.tokens) - passage.first or int(tokens.max()) >= q.shape[-1]:
            raise BadRequest(f"The stored reference read passage {passage.id} with another tokenizer; make it anew.")
        p, found = p.double(), q.gather(1, tokens).double()  # [t, k]
        outside = [(1 - x.exp().sum(1)).clamp_min(1e-12) for x in (p, found)]  # [t]
        kl = (p.exp() * (p - found)).sum(1) + outside[0] * (outside[0].log() - outside[1].log())
        return float(kl.sum()), int((q.argmax(-1) == tokens[:, 0]).sum())
