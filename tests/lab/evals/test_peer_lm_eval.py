"""The log-likelihoods equal those of lm-eval on transformers, if lm-eval is installed."""

from __future__ import annotations

import pytest

pytest.importorskip("lm_eval", reason="a peer: pip install lm-eval")


@pytest.mark.slow
@pytest.mark.real_model
def test_log_likelihoods_equal_those_of_lm_eval():
    huggingface = pytest.importorskip("lm_eval.models.huggingface")
    from lm_eval.api.instance import Instance
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from labkit.lab.bench.peers import folder_of
    from labkit.lab.evals.likelihood import Reader, split
    from labkit.lab.evals.mmlu import MMLU, asked
    from labkit.lab.stack.open import load_model

    folder, model = str(folder_of("default")), load_model()
    theirs = huggingface.HFLM(
        AutoModelForCausalLM.from_pretrained(folder, dtype="float32"),
        tokenizer=AutoTokenizer.from_pretrained(folder),
        device="cpu",
        batch_size=1,
    )
    requests, ours, reader = [], [], Reader(model)
    for item in MMLU(limit=6).items():
        prompt, answers = (
            f"{asked(item, False)}\nAnswer:",
            [f" {choice}" for choice in item.choices],
        )
        ours += reader.log_likelihoods(split(model.tokenizer, prompt, answers))
        requests += [
            Instance("loglikelihood", {}, (prompt, answer), i) for i, answer in enumerate(answers)
        ]
    expected = [nats for nats, _ in theirs.loglikelihood(requests, disable_tqdm=True)]
    assert ours == pytest.approx(expected, abs=1e-3)
