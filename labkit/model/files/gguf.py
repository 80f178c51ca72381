"""Read GGUF, the file format of llama.cpp: metadata and weights.

A quantized tensor consists of rows of blocks. A block of type Q4_1, for example, stores 32
weights as `d * q + m`, with d and m in float16 and q from 0 to 15 (5.0 bits per weight).
The `gguf` package unpacks the blocks. This module gives the tensors the hub's names and
converts them to float32, which represents every type read here exactly.

For "llama" models, llama.cpp stores channel i of a head of q or k next to channel
i + D/2. This module restores the hub's order: first half, then second half.
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

TENSOR_TYPES = tuple("F32 F16 BF16 Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 Q4_K Q5_K Q6_K".split())
_MODULES = {  # module in the file -> module in the hub
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
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
_GEMMA = {  # Gemma has four norms per layer and uses the name ffn_norm for another one
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}


class GGUFFile:
    """One .gguf file, memory-mapped.

    Raises BadRequest if the file is missing or damaged, or if it has a tensor of a type
    that is not in `TENSOR_TYPES`.
    """

    def __init__(self, path: str | Path):
        import gguf

        self.path = Path(path)
        if not self.path.is_file():
            raise BadRequest(f"There is no file {self.path}; give the path of a .gguf file.")
        try:
            self._reader = gguf.GGUFReader(self.path)
        except (ValueError, LookupError, OverflowError, MemoryError) as reason:
            raise BadRequest(
                f"{self.path} is not a complete GGUF file ({reason}); fetch it again."
            ) from reason
        size = self.path.stat().st_size
        if any(t.data_offset + t.n_bytes > size for t in self._reader.tensors):
            raise BadRequest(f"{self.path} is not a complete GGUF file; fetch it again.")
        if other := self.types().keys() - set(TENSOR_TYPES):
            raise BadRequest(
                f"{self.path.name} has tensors of type {', '.join(sorted(other))}; "
                f"give a file with only {', '.join(TENSOR_TYPES)}."
            )
        self.architecture = ""
        self.architecture = self.get("general.architecture", "")

    def get(self, key: str, default: Any = None) -> Any:
        """Return a value of the metadata.

        `{arch}` in the key is replaced by the file's architecture. A float32 is returned as
        its shortest decimal: 1e-5, not 9.99999974e-06.
        """
        field = self._reader.fields.get(key.replace("{arch}", self.architecture))
        if field is None:
            return default
        value = field.contents()
        return float(str(np.float32(value))) if isinstance(value, float) else value

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of each tensor as PyTorch writes it, by its name in the file."""
        return {t.name: tuple(int(n) for n in reversed(t.shape)) for t in self._reader.tensors}

    def types(self) -> Counter[str]:
        """Return the number of tensors of each type."""
        return Counter(t.tensor_type.name for t in self._reader.tensors)

    def raw(self, name: str) -> Tensor:
        """Return a tensor by its name in the file, as float32, with rows in the file's order."""
        from gguf.quants import dequantize

        (tensor,) = (t for t in self._reader.tensors if t.name == name)
        values = dequantize(tensor.data, tensor.tensor_type)
        # F32 values are a view of the read-only file. Unpacked values are a new array.
        return torch.from_numpy(values if values.flags.writeable else values.copy())

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the hub's name and the float32 values of every weight."""
        heads = {"attn_q": self.get("{arch}.attention.head_count")}
        heads["attn_k"] = self.get("{arch}.attention.head_count_kv", heads["attn_q"])
        gemma = self.architecture == "gemma3"
        modules = _MODULES | _GEMMA if gemma else _MODULES
        for name in self.shapes():
            if name == "rope_freqs.weight":
                continue  # part of the configuration
            weight = self.raw(name)
            path, _, kind = name.rpartition(".")
            prefix, module = "", path
            if block := re.fullmatch(r"blk\.(\d+)\.(.+)", path):
                prefix, module = f"model.layers.{block[1]}.", block[2]
            if self.architecture == "llama" and module in heads:
                weight = halves_apart(weight, heads[module])
            if gemma and module.endswith("_norm"):
                weight = weight - 1  # the file stores 1 + weight
            yield f"{prefix}{modules.get(module, module)}.{kind}", weight


def halves_apart(rows: Tensor, heads: int) -> Tensor:
    """Reorder the rows of each head: pairs (i, i + D/2) become first half, second half."""
    pairs = rows.view(heads, -1, 2, *rows.shape[1:])  # [H, D/2, 2, ...]
    return pairs.transpose(1, 2).reshape(rows.shape)
