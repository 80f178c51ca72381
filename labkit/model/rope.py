"""Rotary position embedding (RoPE) and its extensions for longer texts.

RoPE rotates channels i and i + D/2 of a head by the angle `position * frequency_i`, with
`frequency_i = theta^(-2i/D)`. The dot product of two rotated vectors then depends only on
the distance between their positions (Su et al. 2021). A model that reads texts longer than
those in its training changes the frequencies:

- linear divides all frequencies by `factor` (Chen et al. 2023).
- llama3 divides low frequencies by `factor` and keeps high ones. Between them, the two
  values are interpolated (Llama 3.1).
- yarn does the same with other limits. It also multiplies cos and sin by a factor (Peng et
  al. 2023).

Cost: cos and sin are looked up once per forward pass, for all layers. Each layer then needs
three operators.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from labkit.errors import BadRequest, Number, OrNone, Whole, check_fields

KINDS = ("default", "linear", "llama3", "yarn")
_OWN = {  # kind -> its fields besides theta and factor
    "llama3": ("low_freq_factor", "high_freq_factor"),
    "yarn": ("beta_fast", "beta_slow", "attention_factor", "truncate"),
}


@dataclass(frozen=True)
class RopeConfig:
    """The settings of RoPE.

    `original_positions` is the length of the texts in training, in tokens. Llama3 and yarn
    need it. Raises BadRequest if a field is not valid.
    """

    kind: str = "default"
    theta: float = 10000.0
    factor: float = 1.0
    original_positions: int | None = None
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    attention_factor: float | None = None  # yarn; None: 0.1 ln(factor) + 1
    truncate: bool = True  # yarn: round the limits to whole channels

    def __post_init__(self):
        check_supported("rope_type", self.kind, *KINDS)
        needed = Whole(1) if self.kind in _OWN else OrNone(Whole(1))
        check_fields(self, theta=Number(above=0), factor=Number(1), original_positions=needed)

    @classmethod
    def from_settings(cls, settings: Mapping[str, Any], longest: int | None) -> RopeConfig:
        """Return the configuration from the settings in `HubConfig.rope`.

        `longest` is the maximum number of positions of the model. Raises BadRequest for a
        setting that is not supported.
        """
        for name in ("partial_rotary_factor", "mscale", "mscale_all_dim"):
            check_supported(name, settings.get(name), None, 1.0)
        kind, theta = settings["rope_type"], settings["rope_theta"]
        if kind == "default":
            return cls(theta=theta)
        original = settings.get("original_max_position_embeddings") or longest
        factor = settings.get("factor") or (longest or 1) / (original or 1)
        own = {key: settings[key] for key in _OWN.get(kind, ()) if settings.get(key) is not None}
        return cls(kind, theta, factor, None if kind == "linear" else original, **own)

    def to_hf(self) -> dict[str, Any]:
        """Return the keys of a config.json: `rope_parameters` of transformers 5 and older keys."""
        scaling: dict[str, Any] = {} if self.kind == "default" else {"factor": self.factor}
        if self.kind in _OWN:
            own = {name: getattr(self, name) for name in _OWN[self.kind]}
            scaling["original_max_position_embeddings"] = self.original_positions
            scaling |= {name: value for name, value in own.items() if value is not None}
        both = {"rope_type": self.kind, **scaling}
        return {
            "rope_theta": self.theta,
            "rope_scaling": both if scaling else None,
            "rope_parameters": {"rope_theta": self.theta, **both},
        }

    def cos_sin_factor(self) -> float:
        """Return the factor by which cos and sin are multiplied."""
        if self.kind != "yarn":
            return 1.0
        default = 0.1 * math.log(self.factor) + 1.0
        return default if self.attention_factor is None else self.attention_factor

    def frequencies(self, head_dim: int) -> Tensor:
        """Return the frequencies in radians per position, float32 [D/2]."""
        plain = 1.0 / self.theta ** (torch.arange(0, head_dim, 2).float() / head_dim)
        if self.kind == "default":
            return plain
        if self.kind == "linear":
            return plain / self.factor
        original = self.original_positions or 1
        if self.kind == "llama3":
            rotations = original * plain / (2 * math.pi)
            span = self.high_freq_factor - self.low_freq_factor
            keep = ((rotations - self.low_freq_factor) / span).clamp(0, 1)
            return plain / self.factor * (1 - keep) + plain * keep

        def channel(rotations: float) -> float:
            """Return the channel that makes this many rotations over `original` positions."""
            log = math.log(original / (rotations * 2 * math.pi))
            return head_dim * log / (2 * math.log(self.theta))

        low, high = channel(self.beta_fast), channel(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, head_dim - 1)
        ramp = (torch.arange(head_dim // 2).float() - low) / max(high - low, 0.001)
        divided = ramp.clamp(0, 1)
        return plain / self.factor * divided + plain * (1 - divided)


class Rotary:
    """Return cos and sin of positions.

    They come from a table that is computed in float32 and rounded to the requested dtype.
    """

    def __init__(self, config: RopeConfig, head_dim: int):
        self.config, self.head_dim = config, head_dim
        self._tables: dict[tuple[torch.dtype, torch.device], tuple[Tensor, Tensor]] = {}

    def __call__(
        self, positions: Tensor, lengths: Sequence[int], dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """Return cos and sin [B, 1, T, D] of positions [B, T]; the first half of sin is negated.

        `lengths` is the number of tokens per row after this step. It sets the size of the
        table without a wait for the device.
        """
        longest = max(*lengths, positions.shape[1]) + 1
        cos, sin = self._table(longest, dtype, positions.device)
        return cos[positions].unsqueeze(1), sin[positions].unsqueeze(1)

    def _table(
        self, length: int, dtype: torch.dtype, device: torch.device
    ) -> tuple[Tensor, Tensor]:
        table = self._tables.get((dtype, device))
        if table is None or table[0].shape[0] < length:
            size = max(256, 1 << (length - 1).bit_length())
            # Training cannot use a table that was made in inference_mode.
            with torch.inference_mode(False), torch.no_grad():
                frequencies = self.config.frequencies(self.head_dim).to(device)
                angles = torch.arange(size, device=device).float()[:, None] * frequencies
                factor = self.config.cos_sin_factor()
                cos, sin = angles.cos() * factor, angles.sin() * factor  # [S, D/2]
                table = torch.cat((cos, cos), -1).to(dtype), torch.cat((-sin, sin), -1).to(dtype)
            self._tables[dtype, device] = table
        return table


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate heads [B, N, T, D] by cos and sin [B, 1, T, D].

    A roll by D/2 exchanges the halves of a head.
    """
    return torch.addcmul(heads * cos, heads.roll(heads.shape[-1] // 2, -1), sin)


def check_supported(name: str, value: Any, *supported: Any) -> None:
    """Raise BadRequest if a setting of a checkpoint is not one of the supported values."""
    if value not in supported:
        raise BadRequest(
            f"{name} is {value!r}; labkit.model supports {', '.join(map(str, supported))}. "
            "Run other models with labkit.lab.hf."
        )
