"""Compare the decoder with transformers on random tiny models."""

from __future__ import annotations

import pytest
import torch

from labkit.model.rope import RopeConfig
from labkit.model.tiny import tiny_model

pytestmark = pytest.mark.filterwarnings(
    "ignore:.past_key_values. is deprecated"
)  # its successor is newer than 5.0

HEADS = {"gqa": (4, 2), "mha": (4, 4), "mqa": (4, 1), "6/3": (6, 3), "28/4": (28, 4)}
ROPES = {
    "linear": RopeConfig("linear", factor=2.5),
    "llama3": RopeConfig("llama3", theta=500.0, factor=8.0, original_positions=16),
    "yarn": RopeConfig("yarn", theta=500.0, factor=4.0, original_positions=16),
    "yarn-whole": RopeConfig("yarn", 500.0, 4.0, 16, truncate=False),
    "yarn-attention-factor": RopeConfig(
        "yarn", factor=4.0, original_positions=32, attention_factor=1.3, beta_fast=8.0
    ),
}
ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3", "gemma3_text")


def close(ours, theirs):
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)


def text(length=40, batch=1, seed=0):
    return torch.randint(3, 96, (batch, length), generator=torch.Generator().manual_seed(seed))


@torch.inference_mode()
def in_chunks(step, tokens, size):
    return torch.cat([step(chunk) for chunk in tokens.split(size, dim=1)], dim=1)


def compare(twin, model, length=40, chunks=(40, 7, 1)):
    """Compare our logits, with and without a cache, with theirs for the same chunks."""
    from transformers import DynamicCache

    tokens, theirs = text(length), twin(model)
    with torch.inference_mode():
        close(model(tokens), theirs(tokens, use_cache=False).logits)
        for size in chunks:
            cache, their_cache = model.new_cache(), DynamicCache(config=theirs.config)
            ours = in_chunks(lambda chunk, cache=cache: model(chunk, cache), tokens, size)
            close(
                ours,
                in_chunks(
                    lambda c, k=their_cache: theirs(c, past_key_values=k).logits, tokens, size
                ),
            )
            assert cache.length == length


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_logits_equal_for_every_sharing_of_heads(twin, architecture, heads):
    num_heads, num_kv_heads = HEADS[heads]
    model = tiny_model(
        architecture, num_heads=num_heads, num_kv_heads=num_kv_heads, hidden_size=num_heads * 8
    )
    compare(twin, model, 20, (20, 7, 1))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_logits_equal_with_tied_embeddings_and_a_head_dim_that_is_not_hidden_over_heads(
    twin, architecture
):
    model = (
        tiny_model(architecture, tie_embeddings=True, head_dim=10)
        if architecture != "qwen2"
        else tiny_model("qwen2", tie_embeddings=True)
    )
    assert model.head.weight is model.embed_tokens.weight
    compare(twin, model, 20, (20, 1))


@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("architecture", ("llama", "qwen3"))
def test_logits_equal_for_every_rotary_kind_beyond_the_trained_length(twin, architecture, rope):
    compare(
        twin,
        tiny_model(architecture, rope=ROPES[rope], max_positions=64),
    )


@pytest.mark.parametrize("rope", ROPES)
def test_the_rope_kinds_differ_from_plain_rope(rope):
    """The comparison above would also pass if both sides ignored a kind."""
    plain, stretched = tiny_model(), tiny_model(rope=ROPES[rope])
    with torch.inference_mode():
        assert (plain(text()) - stretched(text()))[:, -1].abs().max() > 0.01


@pytest.mark.parametrize(
    ("architecture", "windows"), [("mistral", (5, 5)), ("qwen2", (None, 6)), ("qwen3", (None, 3))]
)
def test_logits_equal_with_windowed_layers(twin, architecture, windows):
    model = tiny_model(architecture, windows=windows)
    compare(twin, model, 24, (24, 7, 1))
    with torch.inference_mode():
        assert (
            model(text()) - tiny_model(architecture)(text())
        ).abs().max() > 0.01  # the window does something


def test_logits_equal_with_all_biases(twin):
    compare(twin, tiny_model("llama", qkv_bias=True, o_bias=True, mlp_bias=True), 12, (12, 5))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_unequal_rows_padded_on_the_right_equal_each_row_alone(twin, architecture):
    """A pad id may equal the EOS id, and a prompt may contain EOS: ids do not mark padding."""
    model = tiny_model(architecture)
    theirs = twin(model)
    prompts = [text(n, seed=n)[0].tolist() for n in (2, 7, 4)]
    prompts[1][3] = model.config.eos_ids[0]
    counts, width = [len(p) for p in prompts], 7
    padded = torch.tensor([p + [model.config.pad_id] * (width - len(p)) for p in prompts])
    with torch.inference_mode():
        cache = model.new_cache(batch=3)
        first = model(padded, cache, counts=counts, last_only=True)[:, 0]
        without = model(padded, counts=counts, last_only=True)[:, 0]
        second = model(first.argmax(-1, keepdim=True), cache)[:, 0]
        for row, prompt in enumerate(prompts):
            alone = theirs(torch.tensor([prompt])).logits[0, -1]
            close(first[row], alone)
            close(without[row], alone)
            close(second[row], theirs(torch.tensor([[*prompt, int(alone.argmax())]])).logits[0, -1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("architecture", ("llama", "qwen3"))
def test_half_precision_is_close_to_transformers(twin, architecture, dtype):
    """Both round, so our error may be a small multiple of theirs."""
    exact = tiny_model(architecture)
    model = tiny_model(architecture, dtype=dtype)
    with torch.inference_mode():
        want = exact(text())
        ours, theirs = model(text()).float(), twin(model)(text()).logits.float()
        assert model(text()).dtype == dtype
        cache = model.new_cache()
        cached = in_chunks(lambda chunk: model(chunk, cache), text(), 7).float()
    error = (theirs - want).abs().mean()
    assert (ours - want).abs().mean() < 1.5 * error
    assert (cached - want).abs().mean() < 1.5 * error


def test_hidden_states_are_the_input_of_the_head():
    model = tiny_model()
    with torch.inference_mode():
        logits, hidden = model(text(6), return_hidden=True)
        assert hidden.shape == (1, 6, 32)
        torch.testing.assert_close(model.head(hidden), logits)
        last, hidden = model(text(6), last_only=True, return_hidden=True)
        assert last.shape == (1, 1, 96) and hidden.shape == (1, 6, 32)
        torch.testing.assert_close(last[:, 0], logits[:, -1])


def test_gradients_reach_every_weight():
    """Distillation trains this decoder, so no operation may change tensors that backward needs."""
    for architecture in ARCHITECTURES:
        model = tiny_model(architecture).requires_grad_(True)
        model(
            text(), model.new_cache(), last_only=False
        )  # a rotary table made here must serve training too
        model(text()).square().mean().backward()
        assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())


def test_any_module_with_the_same_interface_can_replace_a_linear():
    class Wrapped(torch.nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, x):
            return self.inner(x)

    model = tiny_model(tie_embeddings=True)
    with torch.inference_mode():
        want = model(text(9), model.new_cache())
        for layer in model.layers:
            layer.attention.qkv, layer.attention.o = (
                Wrapped(layer.attention.qkv),
                Wrapped(layer.attention.o),
            )
            layer.mlp.gate_up, layer.mlp.down = Wrapped(layer.mlp.gate_up), Wrapped(layer.mlp.down)
        model.head, model.embed_tokens = Wrapped(model.head), Wrapped(model.embed_tokens)
        assert torch.equal(model(text(9), model.new_cache()), want)
