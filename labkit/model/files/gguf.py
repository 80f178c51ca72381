"""Read GGUF, llama.cpp's file: metadata, tensors in blocks of few bits, and their names in the hub.

A quantized tensor is rows of blocks, such as Q4_1: 32 weights as `d * q + m` with d and m in
float16 and q in 0..15 (5.0 bits per weight). The `gguf` package unpacks them. Here they get
the hub's names, and the rows of q and k their order: for its "llama" family llama.cpp keeps
a head's channel i next to channel i + D/2, the hub keeps halves. Values are returned as
float32, which represents every type read here exactly.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from labkit.errors import BadRequest

TENSOR_TYPES = (
    "F32",
    "F16",
    "BF16",
    "Q4_0",
    "Q4_1",
    "Q5_0",
    "Q5_1",
    "Q8_0",
    "Q4_K",
    "Q5_K",
    "Q6_K",
)

_MODULES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GEMMA = {  # four norms a layer, two of them under names that others use otherwise; all stored plus one
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


class GGUFFile:
    """One .gguf file, memory-mapped. `get` reads metadata; `tensors` yields float32 weights under the hub's names."""

    def __init__(self, path: str | Path):
        import gguf

        self.path = Path(path)
        if not self.path.is_file():
            raise BadRequest(f"there is no file {self.path}: give the path of a .gguf file.")
        try:
            self._reader = gguf.GGUFReader(self.path)
        except (
            ValueError,
            IndexError,
            KeyError,
            OverflowError,
            UnicodeDecodeError,
            MemoryError,
        ) as reason:
            raise BadRequest(
                f"{self.path} is not a whole GGUF file ({reason}): fetch it again."
            ) from reason
        size = self.path.stat().st_size
        if any(t.data_offset + t.n_bytes > size for t in self._reader.tensors):
            raise BadRequest(
                f"{self.path} ends before its last tensor does: it was cut short, fetch it again."
            )
        unread = {t.tensor_type.name for t in self._reader.tensors} - set(TENSOR_TYPES)
        if unread:
            raise BadRequest(
                f"{self.path.name} holds tensors of type {', '.join(sorted(unread))}: "
                f"labkit reads {', '.join(TENSOR_TYPES)}, so take a file of one of those."
            )
        self.architecture: str = self.get("general.architecture", "")

    def get(self, key: str, default: Any = None) -> Any:
        """Metadata; `{arch}` in the key stands for the file's architecture. float32 comes as its shortest decimal."""
        field = self._reader.fields.get(key.replace("{arch}", getattr(self, "architecture", "")))
        if field is None:
            return default
        value = field.contents()
        return float(str(np.float32(value))) if isinstance(value, float) else value

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """GGUF name -> shape as PyTorch writes it (rows first)."""
        return {t.name: tuple(int(n) for n in reversed(t.shape)) for t in self._reader.tensors}

    def types(self) -> Counter[str]:
        return Counter(t.tensor_type.name for t in self._reader.tensors)

    def raw(self, name: str) -> Tensor:
        """One tensor by its GGUF name, float32, as it lies in the file."""
        from gguf.quants import dequantize

        (tensor,) = (t for t in self._reader.tensors if t.name == name)
        values = dequantize(tensor.data, tensor.tensor_type)
        # F32 comes as a view of the read-only file; what is unpacked is already ours.
        return torch.from_numpy(values if values.flags.writeable else values.copy())

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """(hub name, float32 weight) for every weight, one at a time."""
        heads = {"attn_q": self.get("{arch}.attention.head_count")}
        heads["attn_k"] = self.get("{arch}.attention.head_count_kv", heads["attn_q"])
        gemma = self.architecture == "gemma3"
        modules = _MODULES | _GEMMA if gemma else _MODULES
        for name in self.shapes():
            if name == "rope_freqs.weight":
                continue  # read into the configuration
            block = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
            if block is None:
                module, _, kind = name.rpartition(".")
                weight = self.raw(name)
                yield (
                    f"{_TOP.get(module, module)}.{kind}",
                    weight - 1 if gemma and module == "output_norm" else weight,
                )
                continue
            index, module, kind = block.groups()
            weight = self.raw(name)
            if self.architecture == "llama" and module in heads:
                weight = halves_apart(weight, heads[module])
            if gemma and module.endswith("_norm"):
                weight = weight - 1
            yield f"model.layers.{index}.{modules.get(module, module)}.{kind}", weight


def halves_apart(rows: Tensor, heads: int) -> Tensor:
    """Undo llama.cpp's order of q and k rows: (i, i + D/2) side by side -> the first halves, then the second."""
    pairs = rows.view(heads, -1, 2, *rows.shape[1:])  # [H, D/2, 2, ...]
    return pairs.transpose(1, 2).reshape(rows.shape)
