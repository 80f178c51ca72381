"""Compare the default model with llama.cpp on the same file, if it is installed.

llama.cpp rounds activations to 8 bits before it multiplies block types: its logits are near, not equal, and where two
tokens are nearly tied the first of them may differ. How often depends on the text: 98 % agreement on HumanEval, which
this file holds to its bar, 96 to 97 % on library prose and code (more near-ties), all at a KL of 0.002 to 0.004.
Given the same weights in float32 it rounds nothing, and then hardly anything is left: that is the sharper test.
"""

from __future__ import annotations

import gzip
import json

import pytest
import torch

from labkit.lab import assets
from labkit.model.files.gguf import GGUFFile

llama_cpp = pytest.importorskip(
    "llama_cpp", reason="llama-cpp-python is not installed (`make peers`)"
)
pytestmark = [pytest.mark.real_model, pytest.mark.slow]

TOKENS = 1000


def peer(path):
    return llama_cpp.Llama(
        model_path=str(path), n_ctx=1024, logits_all=True, verbose=False, n_threads=2
    )


def compare(model, path, ids):
    """Return top-1 agreement and mean KL (nats) of llama.cpp's logits and ours."""
    theirs = peer(path)
    theirs.eval(ids)
    theirs = torch.from_numpy(theirs.scores[: len(ids)].copy()).log_softmax(-1)
    with torch.inference_mode():
        ours = model(torch.tensor([ids]))[0].log_softmax(-1)
    agreement = (ours.argmax(-1) == theirs.argmax(-1)).float().mean().item()
    return agreement, (ours.exp() * (ours - theirs)).sum(-1).mean().item()


def test_the_same_token_ids(default_model, sources):
    theirs = peer(assets.asset_path("default"))
    for text in (
        *sources.values(),
        "½²³ ٣٤٥ don't  \n\n\t x\r\n🙂 日本語 e\u0301 <|im_end|>",
        " leading",
        "",
    ):
        want = theirs.tokenize(text.encode(), add_bos=False, special=True)
        assert default_model.tokenizer.encode(text) == want, text


def test_agreement_and_divergence_on_the_same_file(default_model):
    """Compare logits on the first 1,000 tokens of HumanEval, prompts with solutions."""
    with gzip.open(assets.asset_path("humaneval"), "rt") as lines:
        problems = [json.loads(line) for line in lines]
    text = "\n\n".join(
        problem["prompt"] + problem["canonical_solution"] for problem in problems[:20]
    )
    ids = default_model.tokenizer.encode(text)[:TOKENS]
    assert len(ids) == TOKENS
    agreement, divergence = compare(default_model, assets.asset_path("default"), ids)
    print(f"top-1 agreement {agreement:.4f}, KL {divergence:.5f} nats over {TOKENS} tokens")
    assert agreement >= 0.97
    assert divergence <= 0.02


def test_with_the_same_float32_weights_the_divergence_is_almost_zero(
    default_model, sources, tmp_path, write_gguf
):
    file = GGUFFile(assets.asset_path("default"))
    keys = ("model", "pre", "tokens", "token_type", "merges")
    tokenizer = {key: file.get(f"tokenizer.ggml.{key}") for key in keys}
    path = write_gguf(tmp_path / "float32.gguf", default_model, tokenizer=tokenizer)
    for text in sources.values():
        agreement, divergence = compare(
            default_model, path, default_model.tokenizer.encode(text)[:100]
        )
        assert agreement == 1.0
        assert divergence < 1e-5  # its cache of keys and values is float16
    path.unlink()
