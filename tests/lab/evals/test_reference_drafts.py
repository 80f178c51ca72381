"""The longer training runs learn, and keep the other entries of the draft's record."""

import json

import pytest
import torch

from fakes import load_script
from labkit.lab.distill.corpus import Job, generate_corpus
from labkit.lab.distill.train import Training
from labkit.model.tiny import tiny_model

runs = load_script("data/make_reference_drafts.py")


@pytest.fixture(scope="module")
def target():
    return tiny_model(tie_embeddings=True, num_layers=5)


@pytest.fixture(scope="module")
def texts(target, tmp_path_factory):
    jobs = [Job("chat", (1 + i % 7, 2 + i, 3), 24, 0.7, i) for i in range(24)]
    return generate_corpus(target, jobs, tmp_path_factory.mktemp("corpus"))


def test_both_runs_are_recorded_and_the_other_entries_stay(target, texts, tmp_path, monkeypatch):
    record = tmp_path / "draft.json"
    record.write_text(json.dumps({"kind": "hidden_state", "others": {"older": 1}}))
    monkeypatch.setattr(runs, "load_model", lambda: target)
    monkeypatch.setattr(runs, "training_jobs", lambda tokenizer: texts)
    monkeypatch.setattr(runs, "held_out_jobs", lambda tokenizer, count: texts[:4])
    monkeypatch.setattr(runs, "corpus_of", lambda target, chosen: chosen)
    monkeypatch.setattr(runs, "calibration_pieces", lambda tokenizer: [texts[0].tokens])
    monkeypatch.setattr(runs, "text_task", lambda target: None)
    monkeypatch.setattr(
        runs, "judged", lambda candidate, task: {"kl": float(len(candidate.layers))}
    )
    monkeypatch.setattr(runs, "data_path", lambda name: tmp_path / name)
    monkeypatch.setattr(runs, "cache_dir", lambda: tmp_path)
    monkeypatch.setattr(runs, "STEPS", {"medusa": 3, "pruned": 3})
    monkeypatch.setattr("sys.argv", ["reference_drafts"])
    runs.main()
    kept = json.loads(record.read_text())
    assert kept["kind"] == "hidden_state" and kept["others"]["older"] == 1
    assert set(kept["others"]["medusa"]) == {"head 1", "head 2", "head 3", "all"}
    assert (
        kept["others"]["pruned"]["text"] == {"kl": 4.0} and kept["others"]["pruned"]["steps"] == 3
    )
    assert not list(tmp_path.glob("distill/*.checkpoint"))


def test_four_layers_learn_to_predict_the_target(target, texts, monkeypatch, tmp_path):
    monkeypatch.setattr(runs, "calibration_pieces", lambda tokenizer: [texts[0].tokens])
    monkeypatch.setattr(runs, "text_task", lambda target: None)
    monkeypatch.setattr(runs, "judged", lambda *of: {})
    monkeypatch.setattr(runs, "cache_dir", lambda: tmp_path)
    before = torch.random.get_rng_state()
    found = runs.four_layers(
        target,
        texts,
        texts,
        Training(steps=30, tokens=128, warmup=2, every=30, learning_rate=3e-3),
        lambda progress: None,
    )
    assert found["agreement"]["all"] > found["before"]["all"]
    assert torch.equal(before, torch.random.get_rng_state())
