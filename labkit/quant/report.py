"""What quantising a model did: every parameter with its format, its bits and its bytes, and the share that was quantised."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from labkit.quant.recipe import Recipe
from labkit.quant.survey import Part, share


@dataclass(frozen=True)
class QuantizationReport:
    """What became of each parameter. `nbytes` is resident: predicted before, equal to the tensors after."""

    recipe: Recipe
    method: str
    parts: tuple[Part, ...]
    original_nbytes: int
    notes: tuple[str, ...] = ()

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)

    @property
    def share(self) -> float:
        return share(list(self.parts))

    @property
    def bits_per_weight(self) -> float:
        return 8 * self.nbytes / sum(part.elements for part in self.parts)

    def block_bits(self) -> float:
        """All-in bits a weight of the linear layers in the blocks, which is what methods and recipes vary."""
        blocks = [part for part in self.parts if part.part == "blocks"]
        return 8 * sum(part.nbytes for part in blocks) / sum(part.elements for part in blocks)

    def __str__(self) -> str:
        lines = [
            f"{part.name:<44} {str(list(part.shape)):<18} {part.format:<14} {part.bits:6.3f} bits  {part.reason}".rstrip()
            for part in self.parts
        ]
        lines.append(
            f"{self.share:.1%} of the weights quantised, {self.bits_per_weight:.3f} bits a weight all-in, "
            f"{self.nbytes / 2**20:.1f} MiB ({self.nbytes / self.original_nbytes:.3f} of what it was)"
        )
        return "\n".join([*lines, *self.notes])


def parameter_nbytes(model: nn.Module) -> int:
    """Bytes of the parameters as they are."""
    return sum(p.numel() * p.element_size() for p in model.parameters())
