"""A quantised checkpoint as a model: `load_model("small.safetensors")`.

The file says in its header which model it was made from; that model's configuration and tokenizer are read, its weights
are replaced by the packed ones. What is not packed (norms, biases) takes the dtype that is asked for.
Cost: the original is read once more, so it must still lie where it lay.
"""

from __future__ import annotations

from pathlib import Path

import torch

from labkit.errors import BadRequest
from labkit.model.decoder import Decoder


def load_quantized(path: str | Path, *, dtype: torch.dtype = torch.float32, device="cpu", kernels: str = "torch") -> Decoder:
    """The decoder that `labkit quantize` wrote to `path`, on PyTorch's operators, or `kernels` "native": labkit's own stack,
    or "auto": native where it works for this file and machine. Raises BadRequest with the reason where it must and does not."""
    from labkit.model.load import load_model
    from labkit.quant.checkpoint import load
    from labkit.quant.header import read_header

    about = read_header(path)["about"]
    source = about.get("model") if isinstance(about, dict) else None
    if not isinstance(source, str) or source.endswith(".safetensors"):
        raise BadRequest(
            f"{path} does not say which model it was made from; fill a model yourself with labkit.quant.load."
        )
    try:
        decoder = load_model(source, revision=about.get("revision") if "/" in source else None)
    except BadRequest as error:
        raise BadRequest(f"{path} was made from {source}, which cannot be read: {error}") from None
    native = kernels != "torch" and str(device) == "cpu"
    load(path, decoder, "plain" if native else None)
    decoder.name = f"{source} ({Path(path).name})"
    if native:
        from labkit.model.native_decoder import accelerate

        try:
            return accelerate(decoder, consume=True)
        except BadRequest:
            if kernels == "native":
                raise
            return load_quantized(path, dtype=dtype, device=device)
    return decoder.to(device, dtype).eval()
