"""Back to ordinary layers, with exactly the numbers that the packed ones hold.

For measuring what a format loses: the weights are the quantised ones, the arithmetic is float32 again, so nothing else
differs from the unchanged model, and each weight is unpacked once instead of on every call.
When it loses: it is as large and as slow as the model was before. Never for use.
"""

from __future__ import annotations

from torch import nn

from labkit.quant.linear import QuantizedEmbedding, QuantizedLinear


def unpack_model(model: nn.Module) -> nn.Module:
    """Replace quantised linear layers and embeddings in place by float32 ones; tied ones stay tied. Returns the model."""
    made: dict[int, nn.Parameter] = {}
    for name, module in list(model.named_modules()):
        if not isinstance(module, QuantizedLinear | QuantizedEmbedding):
            continue
        held = module.weight
        if id(held) not in made:
            made[id(held)] = nn.Parameter(held.quantized().dequantize(), requires_grad=False)
        weight = made[id(held)]
        if isinstance(module, QuantizedLinear):
            new = nn.Linear(1, 1, bias=module.bias is not None)
            new.in_features, new.out_features, new.bias = module.in_features, module.out_features, module.bias
        else:
            if module.scale != 1.0:
                continue  # a scaled embedding keeps its own class
            new = nn.Embedding(1, 1)
            new.num_embeddings, new.embedding_dim = module.num_embeddings, module.embedding_dim
        new.weight = weight
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, new.train(module.training))
    return model
