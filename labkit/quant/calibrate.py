"""What each linear layer is given to read: the inputs' second moments, from text run through the model.

    H = (1/n) sum over real tokens of x x^T   [K, K], float32        mean_abs = mean of |x|   [K]

A layer's error on that text is then tr(D H D^T) for any change D of its weights, so GPTQ, AWQ and the clipping search all
work from H and no activations are kept. H is summed in float32: in bfloat16 it loses its positive definiteness, in
float16 it overflows (activations of 300 are common).

Two traps. Padding must never be counted: `counts` says how many tokens of each row are real. And the *first token of each
sequence must be*: position 0 carries activations hundreds of times larger than the rest (it serves as attention's sink)
and is read by every later token; a Hessian made without it, or from windows cut out of running text after the forward
pass, leaves GPTQ no better than rounding. Source: Frantar et al., GPTQ, 2022; the sink: Xiao et al., 2023.

Cost: one forward pass, 2 K^2 operations a token and layer, K^2 * 4 bytes a layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from labkit.errors import BadRequest

SEQUENCES, LENGTH = 96, 256  # of the library's text, wherever nothing else is asked for
CODE_TO_PROSE = (3, 1)  # on equal shares 3 bits lost more on code, on code alone more on prose (default model, one text)


@dataclass
class InputStatistics:
    """Of one linear layer. `hessian` is the mean of x x^T; `tokens` how many were seen."""

    hessian: Tensor  # [K, K] float32
    mean_abs: Tensor  # [K] float32
    tokens: int = 0

    @classmethod
    def empty(cls, features: int, device="cpu") -> InputStatistics:
        return cls(torch.zeros(features, features, device=device), torch.zeros(features, device=device))

    def add(self, x: Tensor) -> None:
        """x [n, K], real tokens only; running means, so that no sum grows without bound."""
        if len(x) == 0:
            return
        x = x.float()
        total = self.tokens + len(x)
        self.hessian.mul_(self.tokens / total).addmm_(x.T, x, alpha=1 / total)
        self.mean_abs.mul_(self.tokens / total).add_(x.abs().sum(0), alpha=1 / total)
        self.tokens = total

    def scaled(self, scale: Tensor) -> InputStatistics:
        """The statistics of x / scale, as a layer sees them after AWQ folded `scale` [K] into what precedes it."""
        return InputStatistics(self.hessian / (scale[:, None] * scale), self.mean_abs / scale, self.tokens)


@dataclass
class Calibration:
    """Token ids for calibration: sequences, each run from its own first token. `seed` and `source` are for records."""

    sequences: list[list[int]]
    batch: int = 8
    include_first: bool = True  # False only to show what that costs
    source: str = ""
    seed: int | None = None
    notes: dict = field(default_factory=dict)

    def __post_init__(self):
        if not self.sequences or not all(len(s) for s in self.sequences):
            raise BadRequest("The calibration is empty; give at least one sequence, and no sequence without tokens.")
        self.sequences = [s.tolist() if isinstance(s, Tensor) else list(s) for s in self.sequences]
        odd = [t for s in self.sequences for t in s if type(t) is not int or t < 0]
        if odd:
            raise BadRequest(f"The calibration holds {odd[0]!r} where a token id belongs; give lists of whole numbers, 0 or more.")
        if type(self.batch) is not int or self.batch < 1:
            raise BadRequest(f"Batches of {self.batch!r} sequences were asked for; give a whole number, 1 or more.")

    @property
    def tokens(self) -> int:
        return sum(len(s) for s in self.sequences)

    @classmethod
    def from_text(
        cls,
        text: str | Sequence[str],
        tokenizer,
        length: int = LENGTH,
        sequences: int = SEQUENCES,
        shares: Sequence[int] | None = None,
        **kwargs,
    ) -> Calibration:
        """Cut a text into sequences of `length` tokens, each of which the model reads from position 0.

        Several texts give sequences as `shares` say, (3, 1) three of the first to one of the second; else equally."""
        texts = [text] if isinstance(text, str) else list(text)
        pieces: list[list[int]] = []
        for one, share in zip(texts, split(sequences, shares or [1] * len(texts)), strict=True):
            ids = tokenizer.encode(one)
            cut = [ids[i : i + length] for i in range(0, len(ids) - length + 1, length)][:share]
            if share and not cut:
                raise BadRequest(
                    f"The calibration text has {len(ids)} tokens, fewer than one sequence of {length}; "
                    "give more text or a shorter length."
                )
            pieces += cut
        return cls(pieces, **kwargs)

    @classmethod
    def from_library(
        cls, tokenizer, length: int = LENGTH, sequences: int = SEQUENCES, seed: int = 0, shares: Sequence[int] = CODE_TO_PROSE
    ) -> Calibration:
        """Code and documentation of the running Python's library; `seed` chooses the documents."""
        from labkit.texts import calibration_text

        characters = max(200_000, 8 * length * sequences)  # a token is four characters or so
        texts = [calibration_text(kind, seed, characters) for kind in ("code", "prose")]
        found = cls.from_text(texts, tokenizer, length, sequences, shares, source="library", seed=seed)
        if len(found.sequences) < sequences:
            raise BadRequest(
                f"{sequences} sequences of {length} tokens were asked for and the library's text gives {len(found.sequences)}; ask for fewer."
            )
        return found

    def batches(self) -> Iterable[tuple[Tensor, list[int]]]:
        """(tokens [B, T] right padded, counts): rows of similar length together."""
        ordered = sorted(self.sequences, key=len)
        for start in range(0, len(ordered), self.batch):
            rows = ordered[start : start + self.batch]
            counts = [len(row) for row in rows]
            yield torch.tensor([row + [0] * (max(counts) - len(row)) for row in rows]), counts


def split(total: int, shares: Sequence[int]) -> list[int]:
    """`total` in whole numbers that go as `shares` do; what is left over goes to the first."""
    ends = [-(-total * sum(shares[: i + 1]) // sum(shares)) for i in range(len(shares))]
    return [end - start for start, end in zip([0, *ends], ends)]


def collect(
    model: nn.Module, names: Sequence[str], calibration: Calibration, forward=None
) -> dict[str, InputStatistics]:
    """Run the calibration through the model and gather what each named layer reads.

    `forward(model, tokens, counts)` runs a batch; by default the model is called with tokens. Right padding never
    reaches a real token of a causal model, and is left out of the sums here.
    """
    modules = {name: model.get_submodule(name) for name in names}
    found: dict[str, InputStatistics] = {}
    counts: list[int] = []

    def hook(name):
        def gather(module, args):
            x = args[0].detach()
            if x.ndim == 2:  # flattened already, as expert layers get it: no row to tell padding by
                if len(set(counts)) > 1:
                    raise BadRequest(
                        f"{name} is given tokens without their rows, so padding cannot be left out; calibrate with sequences of one length."
                    )
                real = x
            else:
                real = torch.cat([row[0 if calibration.include_first else 1 : count] for row, count in zip(x, counts)])
            found.setdefault(name, InputStatistics.empty(x.shape[-1], x.device)).add(real)

        return gather

    handles = [module.register_forward_pre_hook(hook(name)) for name, module in modules.items()]
    read_through(model, calibration, forward, handles, counts)
    device = device_of(model)
    for name in names:  # a layer no token reached (an expert) has no inputs: zeros, and said by the method
        features = getattr(modules[name], "in_features", None) or modules[name].weight.shape[-1]
        found.setdefault(name, InputStatistics.empty(features, device))
    return found


def device_of(model: nn.Module) -> torch.device:
    """Where the first parameter lies, or the first buffer of a model that is all packed."""
    return next((held.device for held in (*model.parameters(), *model.buffers())), torch.device("cpu"))


def read_through(model, calibration: Calibration, forward: Callable | None, handles, counts: list[int] | None = None) -> None:
    """One pass of the text through the model, after which the hooks are gone, whatever happened.

    `counts`, where given, holds the real tokens of each row of the batch that is being read."""
    device = device_of(model)
    try:
        check_vocabulary(model, calibration)
        with torch.inference_mode():
            for tokens, real in calibration.batches():
                if counts is not None:
                    counts[:] = real
                tokens = tokens.to(device)
                forward(model, tokens, real) if forward else model(tokens)
    finally:
        for handle in handles:
            handle.remove()


def check_vocabulary(model: nn.Module, calibration: Calibration) -> None:
    """Refuse token ids past the model's embedding: the text was cut by another model's tokenizer."""
    tables = (m for m in model.modules() if isinstance(getattr(m, "num_embeddings", None), int))
    rows = max((table.num_embeddings for table in tables), default=None)
    largest = max(map(max, calibration.sequences))
    if rows is not None and largest >= rows:
        raise BadRequest(f"The calibration holds token {largest} and the model knows {rows}; cut the text with the model's own tokenizer.")


def first_token_share(
    seen: Mapping[str, InputStatistics], rest: Mapping[str, InputStatistics]
) -> dict[str, float]:
    """{layer: share of its Hessian's trace that the first token of each sequence brings}.

    `seen` is from `collect` with every token, `rest` from the same text with `include_first=False`."""
    weight = lambda one: float(one.hessian.trace()) * one.tokens  # noqa: E731
    return {name: 1 - weight(rest[name]) / weight(seen[name]) for name in seen}
