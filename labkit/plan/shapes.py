"""A model as a list of shapes: every weight matrix, and what each layer caches.

Everything that this room predicts (bytes, operations, seconds) is a sum over this list. A matrix of
[rows, columns] maps `columns` inputs to `rows` outputs: rows * columns weights, twice as many operations a
token. `count` copies of it exist (experts) and one token uses `active` of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from labkit.plan.kv import KVShape


@dataclass(frozen=True)
class Matrix:
    """`part`: "blocks", "embedding", "head", "router", or "vectors" (norms, biases, sinks: kept in full precision)."""

    name: str
    part: str
    rows: int
    columns: int
    layer: int | None = None
    count: int = 1
    active: int | None = None            # None: all of them

    @property
    def parameters(self) -> int:
        return self.rows * self.columns * self.count

    @property
    def active_parameters(self) -> int:
        return self.rows * self.columns * (self.count if self.active is None else self.active)


@dataclass(frozen=True)
class ModelShape:
    """Shapes of one decoder-only model. `dtype` is what its checkpoint holds ("bf16", "fp16", "fp32")."""

    name: str
    architecture: str
    hidden_size: int
    vocab_size: int
    num_heads: int
    intermediate_size: int
    matrices: tuple[Matrix, ...]
    kv: KVShape
    tied: bool
    dtype: str = "bf16"
    max_positions: int | None = None
    value_dim: int | None = None         # MLA: width of a head's value; None: that of its key
    num_experts: int = 0

    @property
    def num_layers(self) -> int:
        return self.kv.num_layers

    @property
    def parameters(self) -> int:
        """Each weight once: a head tied to the embedding adds none."""
        return sum(matrix.parameters for matrix in self.matrices)

    @property
    def active_parameters(self) -> int:
        """Parameters one token uses (fewer than all in a mixture of experts)."""
        return sum(matrix.active_parameters for matrix in self.matrices)

    def part(self, *parts: str) -> Iterator[Matrix]:
        return (matrix for matrix in self.matrices if matrix.part in parts)

    def query_width(self, layer: int) -> int:
        """Numbers in all query heads of a layer: H * D, never the hidden size by assumption."""
        kv = self.kv.layers[layer]
        return self.num_heads * (kv.head_dim if kv.latent_dim is None else kv.latent_dim + kv.rope_dim)
