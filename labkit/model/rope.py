"""Rotary position embedding, and the four ways by which models stretch it.

Channels i and i + D/2 of a head form a plane that is turned by `position * frequency_i`, with
`frequency_i = theta^(-2i/D)`; a dot product of two turned vectors depends only on the distance of their positions
(Su et al. 2021). To read beyond the length it was trained on, a model changes the frequencies:

- linear: all divided by `factor`                                   (Chen et al. 2023)
- dynamic: theta grows with the length in use, beyond the trained one  (NTK-aware; recomputed at every forward)
- llama3: long wavelengths divided by `factor`, short ones kept, a ramp between     (Llama 3.1)
- yarn: the same by number of rotations, and cos and sin times an attention factor  (Peng et al. 2023)

Cost: cos and sin are looked up once a forward, for all layers; then three operators a layer. When it loses: `dynamic`
turns each key by the frequencies of the moment it was cached, so chunking changes the answer (as in transformers).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from labkit.errors import BadRequest

KINDS = ("default", "linear", "dynamic", "llama3", "yarn")


@dataclass(frozen=True)
class RopeConfig:
    """`original_positions`: the length trained on, before stretching. Other fields serve the kinds that name them."""

    kind: str = "default"
    theta: float = 10000.0
    factor: float = 1.0
    original_positions: int | None = None
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    attention_factor: float | None = None  # yarn; None: 0.1 ln(factor) + 1
    mscale: float | None = None  # yarn, DeepSeek's spelling of the attention factor
    mscale_all_dim: float | None = None
    truncate: bool = True  # yarn: whole channels at the ends of the ramp

    def __post_init__(self):
        if self.kind not in KINDS:
            raise BadRequest(
                f"the rotary embedding {self.kind!r} is not one that labkit.model computes ({', '.join(KINDS)}): "
                "labkit.hf runs most other models through transformers."
            )
        if self.kind != "default" and self.factor < 1:
            raise BadRequest(f"the rotary factor {self.factor} would shrink the context: give a number of at least 1.")
        if self.kind in ("dynamic", "llama3", "yarn") and not self.original_positions:
            raise BadRequest(
                f"the rotary embedding {self.kind!r} needs original_positions: give the context length trained on."
            )

    @classmethod
    def from_hf(cls, config: dict) -> RopeConfig:
        stated = {key: config.get(key) or {} for key in ("rope_scaling", "rope_parameters")}
        for key, value in stated.items():
            if not isinstance(value, dict):
                raise BadRequest(f"the configuration says {key} = {value!r}: an object or null is needed there.")
        given = {**stated["rope_scaling"], **stated["rope_parameters"]}
        kind = given.get("rope_type", given.get("type", "default"))
        partial = given.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
        if partial not in (None, 1.0):
            raise BadRequest(
                f"partial_rotary_factor {partial} is not one that labkit.model computes, which turns whole heads: "
                "labkit.hf runs the model through transformers."
            )
        theta = given.get("rope_theta") or config.get("rope_theta") or 10000.0
        if isinstance(theta, bool) or not isinstance(theta, int | float) or not theta > 0:
            raise BadRequest(f"the configuration says rope_theta = {theta!r}: a number above 0 is needed there.")
        theta = float(theta)
        if kind == "default":
            return cls(theta=theta)
        longest = config["max_position_embeddings"]
        original = longest if kind == "dynamic" else given.get("original_max_position_embeddings") or longest
        factor = given.get("factor") or longest / original
        original = None if kind == "linear" else original
        names = (
            "low_freq_factor",
            "high_freq_factor",
            "beta_fast",
            "beta_slow",
            "attention_factor",
            "mscale",
            "mscale_all_dim",
            "truncate",
        )
        stated = {name: given[name] for name in names if given.get(name) is not None}
        return cls(kind, theta, float(factor), original, **stated)

    def to_hf(self) -> dict:
        """Both spellings: `rope_parameters` of transformers 5, `rope_theta` and `rope_scaling` of other readers."""
        scaling = {} if self.kind == "default" else {"factor": self.factor}
        if self.kind in ("llama3", "yarn"):
            scaling["original_max_position_embeddings"] = self.original_positions
        if self.kind == "llama3":
            scaling |= {"low_freq_factor": self.low_freq_factor, "high_freq_factor": self.high_freq_factor}
        if self.kind == "yarn":
            stated = {
                "attention_factor": self.attention_factor,
                "mscale": self.mscale,
                "mscale_all_dim": self.mscale_all_dim,
            }
            scaling |= {"beta_fast": self.beta_fast, "beta_slow": self.beta_slow, "truncate": self.truncate}
            scaling |= {name: value for name, value in stated.items() if value is not None}
        both = {"rope_type": self.kind, **scaling}
        return {
            "rope_theta": self.theta,
            "rope_scaling": both if scaling else None,
            "rope_parameters": {"rope_theta": self.theta, **both},
        }

    def cos_sin_factor(self) -> float:
        if self.kind != "yarn":
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return _mscale(self.factor, self.mscale) / _mscale(self.factor, self.mscale_all_dim)
        return _mscale(self.factor)

    def frequencies(self, head_dim: int, length: int = 0) -> Tensor:
        """Radians a position, float32 [D/2]. `length`, the tokens in use so far, matters to `dynamic` alone."""
        theta, steps = self.theta, torch.arange(0, head_dim, 2).float() / head_dim  # [D/2]
        if self.kind == "dynamic" and length > self.original_positions:
            stretch = self.factor * length / self.original_positions - (self.factor - 1)
            theta = theta * stretch ** (head_dim / (head_dim - 2))
        plain = 1.0 / theta**steps
        if self.kind == "linear":
            return plain / self.factor
        if self.kind == "llama3":
            rotations = self.original_positions * plain / (2 * math.pi)
            keep = ((rotations - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)).clamp(0, 1)
            return plain / self.factor * (1 - keep) + plain * keep
        if self.kind == "yarn":
            low = self._channel(self.beta_fast, head_dim)
            high = self._channel(self.beta_slow, head_dim)
            if self.truncate:
                low, high = math.floor(low), math.ceil(high)
            low, high = max(low, 0), min(high, head_dim - 1)
            ramp = ((torch.arange(head_dim // 2).float() - low) / max(high - low, 0.001)).clamp(0, 1)
            return plain / self.factor * ramp + plain * (1 - ramp)
        return plain

    def _channel(self, rotations: float, head_dim: int) -> float:
        """The channel pair that makes this many full rotations within the trained length."""
        return head_dim * math.log(self.original_positions / (rotations * 2 * math.pi)) / (2 * math.log(self.theta))


def _mscale(factor: float, weight: float = 1.0) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


class Rotary:
    """Gives cos and sin for positions. The table is computed in float32 and kept, rounded, per dtype and device."""

    def __init__(self, config: RopeConfig, head_dim: int):
        self.config, self.head_dim = config, head_dim
        self._tables: dict = {}

    def __call__(self, positions: Tensor, lengths: Sequence[int], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """positions [B, T], and per row the tokens held after this step (numbers: no wait for the device)
        -> cos, sin [B, 1, T, D]; the first half of sin is negated, as `rotate` wants it."""
        longest = self.config.original_positions
        if (
            self.config.kind == "dynamic" and max(lengths) > longest
        ):  # each row by its own length: a batch equals its rows alone
            angles = torch.stack([self.config.frequencies(self.head_dim, n) for n in lengths]).to(
                positions.device
            )  # [B, D/2]
            cos, sin = self._cos_sin(positions[..., None].float() * angles[:, None, :], dtype)
        else:
            table_cos, table_sin = self._table(max(*lengths, positions.shape[1]) + 1, dtype, positions.device)
            cos, sin = table_cos[positions], table_sin[positions]
        return cos.unsqueeze(1), sin.unsqueeze(1)

    def _table(self, length: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
        key = (dtype, device)
        if key not in self._tables or self._tables[key][0].shape[0] < length:
            size = max(256, 1 << (length - 1).bit_length())
            # A table made inside inference_mode could not be used by a later training step.
            with torch.inference_mode(False), torch.no_grad():
                positions = torch.arange(size, device=device).float()
                angles = positions[:, None] * self.config.frequencies(self.head_dim).to(device)  # [S, D/2]
                self._tables[key] = self._cos_sin(angles, dtype)
        return self._tables[key]

    def _cos_sin(self, angles: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        factor = self.config.cos_sin_factor()
        cos, sin = angles.cos() * factor, angles.sin() * factor
        return torch.cat((cos, cos), -1).to(dtype), torch.cat((-sin, sin), -1).to(dtype)


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """heads [B, N, T, D] turned by cos, sin [B, 1, T, D]; swapping the halves of a head is a roll by D/2."""
    return torch.addcmul(heads * cos, heads.roll(heads.shape[-1] // 2, -1), sin)
