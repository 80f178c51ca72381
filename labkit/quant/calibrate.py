"""Collect second moments of the inputs of each linear layer on some text.

    H = (1/n) sum over real tokens of x x^T  [K, K], float32    mean_abs = mean |x|  [K]

If the weights of a layer change by D, its error on that text is tr(D H D^T). So GPTQ,
AWQ and the clipping search use H, and no activations are stored. H is summed in
float32. In bfloat16 it would lose its positive definiteness, and in float16 it would
overflow, because activations of 300 are common.

Padding must not be counted: `counts` says how many tokens of each row are real. The
*first token of each sequence must be counted*. Position 0 carries activations hundreds
of times larger than the rest (attention's sink), and every later token reads it. GPTQ
with a Hessian without first tokens is no better than rounding. Source: Frantar et al.,
GPTQ, 2022; for the sink, Xiao et al., 2023.

Cost: one forward pass, 2 K^2 operations per token and layer, and 4 K^2 bytes per layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from labkit.errors import BadRequest, Whole, check_fields

SEQUENCES, LENGTH = 96, 256  # of the library's text, by default
# At 3 bits, equal shares lost more on code, and code alone lost more on prose (one text).
CODE_TO_PROSE = (3, 1)

Forward = Callable[[nn.Module, Tensor, list[int]], object]  # model, tokens [B, T], real tokens


@dataclass
class InputStatistics:
    """Statistics of a layer's inputs; `hessian` is the mean of x x^T over `tokens`."""

    hessian: Tensor  # [K, K] float32
    mean_abs: Tensor  # [K] float32
    tokens: int = 0

    @classmethod
    def empty(cls, features: int, device: torch.device | str = "cpu") -> InputStatistics:
        hessian = torch.zeros(features, features, device=device)
        return cls(hessian, torch.zeros(features, device=device))

    def add(self, x: Tensor) -> None:
        """Add inputs x [n, K] of real tokens to the running means."""
        if len(x) == 0:
            return
        x = x.float()
        total = self.tokens + len(x)
        self.hessian.mul_(self.tokens / total).addmm_(x.T, x, alpha=1 / total)
        self.mean_abs.mul_(self.tokens / total).add_(x.abs().sum(0), alpha=1 / total)
        self.tokens = total

    def scaled(self, scale: Tensor) -> InputStatistics:
        """Return the statistics of x / scale, for AWQ's `scale` [K]."""
        hessian = self.hessian / (scale[:, None] * scale)
        return InputStatistics(hessian, self.mean_abs / scale, self.tokens)


@dataclass
class Calibration:
    """Token ids for calibration, and how the model reads them.

    sequences: token ids; the model reads each sequence from its first token.
    batch: number of sequences per forward pass.
    include_first: False leaves the first token of each sequence out of the statistics;
        for experiments only.
    forward: `forward(model, tokens, counts)` runs a batch; the default is
        `model(tokens)`.
    blocks: the model's layers in order (`model.layers`). If they are given, the model is
        calibrated layer by layer (`labkit.quant.layer_by_layer`).
    """

    sequences: Sequence[Sequence[int]]
    batch: int = 8
    include_first: bool = True
    forward: Forward | None = None
    blocks: Sequence[nn.Module] = ()

    def __post_init__(self):
        check_fields(self, batch=Whole(1))
        self.sequences = [s.tolist() if isinstance(s, Tensor) else list(s) for s in self.sequences]
        if not self.sequences or not all(self.sequences):
            raise BadRequest("The calibration is empty; give sequences with at least one token.")
        for token in (token for sequence in self.sequences for token in sequence):
            if type(token) is not int or token < 0:
                raise BadRequest(f"The calibration contains {token!r}, which is not a token id.")

    @property
    def tokens(self) -> int:
        return sum(map(len, self.sequences))

    @classmethod
    def from_text(
        cls,
        text: str | Sequence[str],
        tokenizer,
        length: int = LENGTH,
        sequences: int = SEQUENCES,
        shares: Sequence[int] | None = None,
    ) -> Calibration:
        """Cut a text into sequences of `length` tokens.

        If several texts are given, `shares` says how many sequences come from each: with
        (3, 1), three from the first per one from the second. The default is equal
        shares.
        """
        texts = [text] if isinstance(text, str) else list(text)
        pieces: list[list[int]] = []
        for one, share in zip(texts, split(sequences, shares or [1] * len(texts)), strict=True):
            ids = tokenizer.encode(one)
            cut = [ids[i : i + length] for i in range(0, len(ids) - length + 1, length)][:share]
            if share and not cut:
                size = f"{len(ids)} tokens, fewer than one sequence of {length}"
                raise BadRequest(f"The calibration text has {size}; give more text.")
            pieces += cut
        return cls(pieces)

    def batches(self) -> Iterator[tuple[Tensor, list[int]]]:
        """Yield (tokens [B, T] padded on the right, counts), sorted by length."""
        ordered = sorted(self.sequences, key=len)
        for start in range(0, len(ordered), self.batch):
            rows = [torch.tensor(row) for row in ordered[start : start + self.batch]]
            yield nn.utils.rnn.pad_sequence(rows, batch_first=True), list(map(len, rows))


def split(total: int, shares: Sequence[int]) -> list[int]:
    """Split `total` in proportion to `shares`; the first part gets the remainder."""
    ends = [-(-total * sum(shares[: i + 1]) // sum(shares)) for i in range(len(shares))]
    return [end - start for start, end in zip([0, *ends], ends)]


def collect(
    model: nn.Module,
    names: Sequence[str],
    calibration: Calibration,
    forward: Forward | None = None,
) -> dict[str, InputStatistics]:
    """Run the calibration through the model; return each named layer's statistics.

    `forward` replaces the calibration's own. Right padding does not affect real tokens
    in a causal model, and it is not counted. A layer that no token reached (an expert)
    gets zeros. Raises BadRequest if a layer gets flattened tokens, so that padding is
    unknown.
    """
    statistics: dict[str, InputStatistics] = {}
    counts: list[int] = []
    handles = []

    def add(name: str, x: Tensor) -> None:
        if x.ndim > 2:
            first = 0 if calibration.include_first else 1
            x = torch.cat([row[first:count] for row, count in zip(x, counts)])
        elif len(set(counts)) > 1:  # the tokens are flattened, as for expert layers
            text = f"{name} gets flattened tokens, so padding is unknown"
            raise BadRequest(f"{text}; give sequences of equal length.")
        statistics[name].add(x.detach())

    for name in names:
        module: Any = model.get_submodule(name)
        transposed = hasattr(module, "nf")  # GPT-2's Conv1D, whose weight is [K, N]
        features = module.weight.shape[0 if transposed else -1]
        statistics[name] = InputStatistics.empty(features, module.weight.device)
        hook = lambda module, args, name=name: add(name, args[0])  # noqa: E731
        handles.append(module.register_forward_pre_hook(hook))
    read_through(model, calibration, handles, forward, counts)
    return statistics


def device_of(model: nn.Module) -> torch.device:
    """Return the device of the first parameter or buffer."""
    tensors = (*model.parameters(), *model.buffers())
    return next((tensor.device for tensor in tensors), torch.device("cpu"))


def read_through(
    model: nn.Module,
    calibration: Calibration,
    handles: Sequence,
    forward: Forward | None = None,
    counts: list[int] | None = None,
) -> None:
    """Run the text through the model once, and then remove the hooks `handles`.

    The hooks are removed even after an error. `counts` receives the number of real
    tokens of each row of the current batch. Raises BadRequest for a token id that the
    embedding does not have.
    """
    forward = forward or calibration.forward or (lambda model, tokens, counts: model(tokens))
    try:
        rows = max(int(getattr(module, "num_embeddings", 0)) for module in model.modules())
        largest = max(map(max, calibration.sequences))
        if rows and largest >= rows:
            text = f"The calibration contains token {largest}, but the model has {rows} tokens"
            raise BadRequest(f"{text}; encode the text with the model's own tokenizer.")
        with torch.inference_mode():
            for tokens, real in calibration.batches():
                if counts is not None:
                    counts[:] = real
                forward(model, tokens.to(device_of(model)), real)
    finally:
        for handle in handles:
            handle.remove()
