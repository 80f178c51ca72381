"""Other people's quantised weights: torchao's, and those that `transformers` loads a model with, in bf16 on one checkpoint.

    torchao             INT8 a channel, symmetric: the numbers of int8_channel
    torchao-int4        groups of 64 with a float middle in torch's tinygemm layout: the numbers of int4_g64_mid
    quanto-int8, -int4  optimum-quanto: INT8 a channel; INT4 in groups of 128 with a float shift, unpacked on every call
    bitsandbytes-int8   LLM.int8(): activations are rounded too, columns with outliers apart
    bitsandbytes-nf4    sixteen values at the quantiles of a normal distribution, blocks of 64, a float32 scale

All leave the head in bf16: it is tied to the embedding, and a rounded head would be a second table beside it.
Each runs as its own guide says. `make peers` installs those that are light; a missing one is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps

from labkit.errors import BadRequest

PACKAGES = {
    "torchao": ("torchao",),
    "torchao-int4": ("torchao",),
    "quanto-int8": ("optimum.quanto", "accelerate"),
    "quanto-int4": ("optimum.quanto", "accelerate"),
    "bitsandbytes-int8": ("bitsandbytes", "accelerate"),
    "bitsandbytes-nf4": ("bitsandbytes", "accelerate"),
}
NOTES = {
    "torchao": "int8", "torchao-int4": "int4, groups of 64", "quanto-int8": "int8", "quanto-int4": "int4, groups of 128",
    "bitsandbytes-int8": "LLM.int8()", "bitsandbytes-nf4": "nf4, blocks of 64",
}  # fmt: skip


def quantized_peer(name: str, folder, device="cpu"):
    """transformers' decoder from `folder` with its blocks quantised by `name`; what is left is bf16."""
    import torch
    from transformers import AutoModelForCausalLM

    def read(**more):
        decoder = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, **more)
        return (decoder if more else decoder.to(device)).eval()

    if name.startswith("torchao"):
        decoder, quantize = read(), _torchao(name, device)
        quantize(decoder.model.layers)
        return decoder
    decoder = read(quantization_config=_config(name), device_map=str(device))
    if name == "quanto-int4":
        _leave_inference_mode(decoder)
    return decoder


def _leave_inference_mode(decoder) -> None:
    """quanto's INT4 weights are a tensor subclass that PyTorch's inference mode does not let it unpack."""
    import torch

    forward = decoder.forward

    @wraps(forward)
    def call(*args, **kwargs):
        with torch.inference_mode(False), torch.no_grad():
            return forward(*args, **kwargs)

    decoder.forward = call


def _torchao(name: str, device) -> Callable:
    """`quantize_` with its config; torchao keeps the CPU's INT4 layout among its prototypes."""
    import torch
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    if not name.endswith("int4"):
        return lambda layers: quantize_(layers, Int8WeightOnlyConfig())
    if torch.device(device).type != "cpu":
        raise BadRequest("peer 'torchao-int4' is set up for the CPU's layout; leave it out on other devices.")
    from torchao.prototype.quantization.int4 import PrototypeInt4WeightOnlyConfig

    return lambda layers: quantize_(layers, PrototypeInt4WeightOnlyConfig(group_size=64))


def _config(name: str):
    import torch
    from transformers import BitsAndBytesConfig, QuantoConfig

    if name == "bitsandbytes-int8":
        return BitsAndBytesConfig(load_in_8bit=True)
    if name == "bitsandbytes-nf4":
        return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16)
    return QuantoConfig(weights=name.removeprefix("quanto-"))
