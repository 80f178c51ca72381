"""Each row of a batch gives the same result as the row alone, for every cache."""

import pytest
import torch

from labkit.cache import CACHES, eviction, quantized_cache, windowed_cache
from labkit.model.tiny import tiny_model
from labkit.plan.kv_formats import KVFormat, Part

MAKERS = {name: maker for name, maker in CACHES.items() if maker is not None} | {
    "window narrower than its sinks": windowed_cache(3, sinks=9),
    "budget of 8": lambda *args, **rest: eviction.Observed(
        *args, budget=8, sinks=1, recent=2, **rest
    ),
    "3 and 5 bits": quantized_cache(
        KVFormat("x", Part(3, "channel", 4, 16, 16), Part(5, "token", 3, 16, 16), 3)
    ),
}
PASSES = [
    (64, [0, 64, 9]),
    (7, [7, 0, 1]),
    (1, [1, 1, 0]),
    (1, None),
    (64, [3, 64, 64]),
    (7, None),
    (1, [0, 1, 1]),
]


@pytest.mark.parametrize("name", MAKERS)
@torch.inference_mode()
def test_a_row_in_a_batch_equals_the_row_alone(name):
    model, generator = tiny_model(), torch.Generator().manual_seed(0)
    cache, passes_of = MAKERS[name](model.config.kv_shape, batch=3, capacity=300), [[], [], []]
    for width, counts in PASSES:
        tokens = torch.randint(model.config.vocab_size, (3, width), generator=generator)
        logits = model(tokens, cache, counts)
        for row, count in enumerate(counts or [width] * 3):
            if count:
                passes_of[row].append((tokens[row : row + 1, :count], logits[row, :count]))
    for row, passes in enumerate(passes_of):
        alone = MAKERS[name](model.config.kv_shape, batch=1, capacity=300)
        for tokens, expected in passes:
            torch.testing.assert_close(
                model(tokens, alone)[0], expected, atol=5e-3, rtol=0
            )  # rounding may change a code
        assert alone.lengths[0] == cache.lengths[row]
