"""The default model against llama.cpp on the same file, where `llama-cpp-python` is installed.

llama.cpp quantises activations to 8 bits before it multiplies, so that its logits are near and not equal."""

from __future__ import annotations

import pytest
import torch

from labkit import assets

llama_cpp = pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed (`make peers`)")
pytestmark = [pytest.mark.real_model, pytest.mark.slow]

TOKENS = 500  # of each of the two texts


@pytest.fixture(scope="module")
def peer():
    path = str(assets.asset_path("default"))
    return llama_cpp.Llama(model_path=path, n_ctx=1024, logits_all=True, verbose=False, n_threads=2)


def test_the_same_token_ids(default_model, peer, sources):
    for text in (*sources.values(), "½²³ ٣٤٥ don't  \n\n\t x\r\n🙂 日本語 e\u0301 <|im_end|>", " leading", ""):
        theirs = peer.tokenize(text.encode(), add_bos=False, special=True)
        assert default_model.tokenizer.encode(text) == theirs, text


def test_agreement_and_divergence(default_model, peer, sources):
    agreed, divergence = [], []
    for name, text in sources.items():
        text = text if name == "code" else text * 5
        ids = default_model.tokenizer.encode(text)[:TOKENS]
        assert len(ids) == TOKENS
        peer.reset()
        peer.eval(ids)
        theirs = torch.from_numpy(peer.scores[:TOKENS].copy()).log_softmax(-1)
        with torch.inference_mode():
            ours = default_model(torch.tensor([ids]))[0].log_softmax(-1)
        agreed.append((ours.argmax(-1) == theirs.argmax(-1)).float().mean().item())
        divergence.append((ours.exp() * (ours - theirs)).sum(-1).mean().item())
    print(f"top-1 agreement {agreed}, KL {divergence} ({', '.join(sources)}; {TOKENS} tokens each)")
    assert sum(agreed) / len(agreed) >= 0.97
    assert sum(divergence) / len(divergence) <= 0.02
