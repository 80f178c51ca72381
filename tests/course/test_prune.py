"""A model with fewer layers: influence of the layers, pruning, and training."""

import pytest
import torch

from labkit.errors import BadRequest
from labkit.lab.distill.corpus import Job, generate_corpus
from labkit.lab.distill.train import Training, fit
from labkit.model.tiny import tiny_model
from labkit_course.experiments.prune import Pruned, influence, pruned, pruned_agreement, pruned_loss


@pytest.fixture(scope="module")
def target():
    return tiny_model(tie_embeddings=True, num_layers=3)


@pytest.fixture(scope="module")
def texts(target, tmp_path_factory):
    jobs = [Job("chat", (3 + i % 7, 5 + i, 9), 20, 0.7, i) for i in range(48)]
    return generate_corpus(target, jobs, tmp_path_factory.mktemp("corpus"))


def test_a_pruned_model_learns_and_the_target_does_not_change(target, texts):
    weights = {name: weight.clone() for name, weight in target.state_dict().items()}
    draft = pruned(target, 2, influence(target, [text.tokens for text in texts[:8]]))
    net = Pruned(draft, torch.arange(96))
    before = pruned_agreement(net, texts[:16])["all"]
    training = Training(steps=12, tokens=512, learning_rate=1e-2, warmup=2, every=6)
    history = fit(net, texts[16:], lambda some: pruned_loss(net, some), training)
    assert history[1]["loss"] < history[0]["loss"]
    assert pruned_agreement(net, texts[:16])["all"] > before
    for name, weight in target.state_dict().items():
        assert torch.equal(weight, weights[name])


def test_the_layers_with_the_largest_influence_stay(texts):
    target = tiny_model(tie_embeddings=True, num_layers=4)
    with torch.no_grad():  # layer 1 adds nothing
        target.layers[1].attention.o.weight.zero_()
        target.layers[1].mlp.down.weight.zero_()
    shares = influence(target, [text.tokens for text in texts[:4]])
    assert shares[1] == pytest.approx(0, abs=1e-6) and min(shares[0], *shares[2:]) > 0.01
    second = pruned(target, 3, shares).layers[1]
    assert torch.equal(second.mlp.down.weight, target.layers[2].mlp.down.weight)
    with pytest.raises(BadRequest, match="keep is 1; give 2 to 4 layers"):
        pruned(target, 1, shares)
