"""Trained drafts on tiny models: their caches, their text, their training and their files."""

import json
import os
import signal
import subprocess
import sys
import time
from functools import cache
from itertools import islice
from pathlib import Path

import pytest
import torch

from fakes import ByteTokenizer
from labkit.errors import BadRequest
from labkit.files import save_tensors
from labkit.generate import Sampling, generate
from labkit.generate import generate as plain
from labkit.lab.distill.corpus import Job, Text, generate_corpus
from labkit.lab.distill.distill import Recipe, distill
from labkit.lab.distill.loss import acceptance, chain_loss, chains
from labkit.lab.distill.medusa_loss import head_agreement, medusa_loss
from labkit.lab.distill.start import fitted_start
from labkit.lab.distill.train import Training, fit
from labkit.model.tiny import tiny_model
from labkit.quant import quantize_model
from labkit.speculate import LookupFirst, load_draft, make_drafter
from labkit.speculate.hidden_state import HiddenState, HiddenStateNet
from labkit.speculate.medusa import Medusa, MedusaNet
from labkit.speculate.trained import read_about, save_draft

EVERY = torch.arange(96)
PROMPTS = [[5, 9, 40, 3], [8, 8, 70, 21, 33, 60, 4], [90]]


def job(seed, kind="chat", temperature=0.0):
    generator = torch.Generator().manual_seed(seed)
    prompt = torch.randint(3, 96, (4 + seed % 5,), generator=generator)
    return Job(kind, tuple(prompt.tolist()), 20, temperature, seed)


@pytest.fixture(scope="module")
def target():
    return tiny_model(tie_embeddings=True, num_layers=3)


@pytest.fixture(scope="module")
def texts(target, tmp_path_factory):
    """Return sampled texts, because a random model's greedy text soon repeats itself."""
    return generate_corpus(
        target, [job(i, temperature=0.7) for i in range(48)], tmp_path_factory.mktemp("corpus")
    )


@pytest.fixture(scope="module")
def started(target, texts):
    return fitted_start(target, EVERY, [text.tokens for text in texts])


def states_of(target, tokens):
    return target(torch.tensor([tokens]), return_hidden=True)[1][0]


# ---- the corpus ------------------------------------------------------------------------------------------------


def test_answers_and_states_equal_those_of_generate(target, tmp_path):
    jobs = [job(i) for i in range(11)]
    for one, text in zip(
        jobs, generate_corpus(target, jobs, tmp_path, batch=4)
    ):  # other jobs take the rows that end
        assert text.start == len(one.prompt)
        assert (
            tuple(text.tokens[text.start :].tolist())
            == plain(target, list(one.prompt), max_new_tokens=20).tokens
        )
        assert torch.allclose(
            text.hidden.float(), states_of(target, text.tokens.tolist()), atol=0.05
        )  # bfloat16


def test_finished_answers_are_read_from_the_folder(target, tmp_path, monkeypatch):
    jobs = [job(i, temperature=0.5) for i in range(6)]
    first = generate_corpus(target, jobs, tmp_path)
    monkeypatch.setattr("labkit.lab.distill.corpus._answers", None)  # an error if a text is missing
    again = generate_corpus(target, jobs, tmp_path)
    assert all(
        torch.equal(a.tokens, b.tokens) and torch.equal(a.hidden, b.hidden)
        for a, b in zip(first, again)
    )
    with pytest.raises(TypeError):
        generate_corpus(target, jobs[:5], tmp_path)  # other jobs are another corpus


def test_library_text_is_not_continued(target, tmp_path):
    (text,) = generate_corpus(target, [Job("library", tuple(range(5, 30)), 0)], tmp_path)
    assert text.tokens.tolist() == list(range(5, 30)) and text.start == 0 and len(text.hidden) == 25


# ---- the hidden-state drafter ----------------------------------------------------------------------------------


@torch.no_grad()
def test_a_chain_in_training_gives_the_states_of_the_drafter(target, started, texts):
    """Compare the packed training pass with single steps on a cache that is rewound."""
    from labkit.cache import make_cache

    text = texts[0]
    states, tokens = states_of(target, text.tokens.tolist()), text.tokens.long()
    exact = Text(text.kind, text.tokens, states, text.start)
    got = list(chains(started, [exact, exact], 3))
    start, n = text.start - 1, len(tokens) - 1
    cache = make_cache("contiguous", started.config.kv_shape, batch=1, capacity=64)
    started(states[None, :start], tokens[None, 1 : start + 1], cache)
    for i in range(start, n - 2):
        state = states[i]
        for k in range(3):
            state = started(state[None, None], tokens[None, i + 1 + k, None], cache)[0, 0]
            assert torch.allclose(state, got[k][i - start], atol=1e-4)
            assert torch.allclose(
                state, got[k][n - start - k + i - start], atol=1e-4
            )  # the second text of the pack
        cache.rewind(i)
        started(states[None, i, None], tokens[None, i + 1, None], cache)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("draft_length", range(1, 9))
def test_drafting_gives_the_text_of_plain_decoding(target, started, draft_length, batch):
    expected = [done.tokens for done in plain(target, PROMPTS[:batch], max_new_tokens=17)]
    for drafter in (
        HiddenState(started, target, packed=False),
        LookupFirst(HiddenState(started, target)),
    ):
        done = generate(
            target, PROMPTS[:batch], drafter=drafter, draft_length=draft_length, max_new_tokens=17
        )
        assert [one.tokens for one in done] == expected


def test_medusa_heads_give_the_text_of_plain_decoding(target):
    drafter = Medusa(MedusaNet(target.config, EVERY), target)
    expected = [done.tokens for done in plain(target, PROMPTS, max_new_tokens=15)]
    done = generate(target, PROMPTS, drafter=drafter, draft_length=5, max_new_tokens=15)
    assert [one.tokens for one in done] == expected and sum(one.tally.drafted for one in done) > 10


@pytest.mark.parametrize("chunk", [None, 2])
def test_the_drafters_cache_has_every_committed_token_and_no_guess(target, started, chunk):
    """Count cached and waiting states after each pass, whatever the target rejected."""
    seen = []

    class Watched(HiddenState):
        def observe(self, accepted, hidden=None):
            super().observe(accepted, hidden)
            for row, length, waiting, count in zip(
                self.rows, self.cache.lengths, self.waiting, accepted
            ):
                seen.append((length + len(waiting), len(row.history) - 1, count))

        def propose(self, rows, limits):
            self.rows = rows
            return super().propose(rows, limits)

    drafter = Watched(started, target)
    for _ in range(2):  # the second call starts from nothing, too
        generate(
            target,
            PROMPTS[1],
            drafter=drafter,
            draft_length=3,
            max_new_tokens=24,
            prefill_chunk=chunk,
            end_ids=(),
        )
    assert len({accepted for *_, accepted in seen}) > 1 and all(
        entries == tokens for entries, tokens, _ in seen
    )


def test_exact_guesses_are_all_accepted(target):
    """Show that states and tokens stay aligned in the cache, for drafts of any length."""

    class Oracle(HiddenStateNet):
        def forward(self, states, tokens, cache, counts=None):
            positions = cache.advance(tokens.shape[1], counts)
            # The guess is the true next state of the target on the text so far.
            out = torch.zeros_like(states)
            for b, row in enumerate(positions.tolist()):
                for t, position in enumerate(row):
                    self.text[b][position + 1 :] = [int(tokens[b, t])]
                    out[b, t] = states_of(self.target, self.text[b])[-1]
            return out

    net = Oracle(target.config, EVERY)
    net.target, prompt = target, PROMPTS[1]
    for draft_length in range(1, 6):
        net.text = [list(prompt[:1])]
        done = generate(
            target,
            prompt,
            drafter=HiddenState(net, target, packed=False),
            draft_length=draft_length,
            max_new_tokens=51,
            end_ids=(),
        )
        assert done.alpha == 1.0 and done.tally.drafted == done.tally.accepted > 20


def test_acceptance_equals_the_alpha_of_drafting(target, started, tmp_path):
    texts = generate_corpus(target, [job(i) for i in range(200, 212)], tmp_path)
    accepted = examined = 0
    for text in texts:
        prompt = text.tokens[: text.start].tolist()
        done = generate(
            target,
            prompt,
            drafter=HiddenState(started, target, packed=False),
            draft_length=4,
            max_new_tokens=20,
        )
        accepted, examined = accepted + done.tally.accepted, examined + done.tally.examined
    assert acceptance(started, texts, 4)["all"] == pytest.approx(
        accepted / examined, abs=0.03
    )  # the last tokens differ


def test_sampled_drafts_repeat_with_a_seed(target, started):
    sampling = Sampling(temperature=0.8, top_k=12, repetition_penalty=1.2, seed=3)
    drafter = HiddenState(started, target)
    one, two = (
        generate(target, PROMPTS, drafter=drafter, max_new_tokens=12, sampling=sampling)
        for _ in range(2)
    )
    assert [a.tokens for a in one] == [b.tokens for b in two]
    assert sum(done.tally.accepted for done in one) > 0


# ---- training --------------------------------------------------------------------------------------------------


def random_net(target):
    torch.manual_seed(0)
    return HiddenStateNet(target.config, EVERY).bind(target)


def test_training_lowers_the_loss_and_raises_acceptance(target, texts):
    net = random_net(target)
    before = acceptance(net, texts[:16])["all"]
    history = fit(
        net,
        texts[16:],
        lambda some: chain_loss(net, some),
        Training(steps=16, tokens=256, learning_rate=1e-2, warmup=2, every=8),
    )
    assert history[-1]["loss"] < 0.8 * history[0]["loss"]
    assert acceptance(net, texts[:16])["all"] > before + 0.05


def test_medusa_heads_learn(target, texts):
    training = Training(steps=12, tokens=512, learning_rate=1e-2, warmup=2, every=6)
    heads = MedusaNet(target.config, EVERY).bind(target)
    history = fit(
        heads,
        texts,
        lambda some: medusa_loss(heads, some),
        training,
        score=lambda: head_agreement(heads, texts),
    )
    assert history[1]["loss"] < history[0]["loss"]
    assert set(history[0]) >= {"head 1", "head 3", "all"}


@pytest.mark.parametrize("stop_at", [4, 7])
def test_a_resumed_run_ends_with_the_same_weights(target, texts, tmp_path, stop_at):
    training = Training(steps=8, tokens=128, warmup=2, every=2)

    class Killed(Exception):
        pass

    def until(limit):
        def report(progress):
            if progress.step == limit:
                raise Killed

        return report

    whole = random_net(target)
    fit(whole, texts, lambda some: chain_loss(whole, some, steps=2), training)
    net, checkpoint = random_net(target), tmp_path / "net.checkpoint"
    with pytest.raises(Killed):
        fit(
            net,
            texts,
            lambda some: chain_loss(net, some, steps=2),
            training,
            checkpoint,
            on_progress=until(stop_at),
        )
    net = random_net(target)
    history = fit(net, texts, lambda some: chain_loss(net, some, steps=2), training, checkpoint)
    assert [entry["step"] for entry in history] == [2, 4, 6, 8]
    assert all(
        torch.equal(a, b) for a, b in zip(whole.state_dict().values(), net.state_dict().values())
    )


def test_a_checkpoint_of_another_training_is_an_error(target, texts, tmp_path):
    net, checkpoint = random_net(target), tmp_path / "net.checkpoint"
    loss = lambda some: chain_loss(net, some, steps=1)  # noqa: E731
    fit(net, texts[:8], loss, Training(steps=2, tokens=64, every=1), checkpoint)
    with pytest.raises(BadRequest, match="another training"):
        fit(net, texts[:8], loss, Training(steps=2, tokens=65, every=1), checkpoint)
    with pytest.raises(BadRequest, match="too late to continue"):
        fit(net, texts[:8], loss, Training(steps=9, tokens=64, every=1), checkpoint)


@pytest.mark.parametrize(
    "settings", [{"steps": 0}, {"learning_rate": 0.0}, {"averaging": 1.0}, {"tokens": 0}]
)
def test_settings_that_are_not_valid_are_errors(settings):
    (name,) = settings
    with pytest.raises(BadRequest, match=f"{name} is .*; give a"):
        Training(**settings)


# ---- files -----------------------------------------------------------------------------------------------------


@pytest.fixture
def file(started, tmp_path):
    save_draft(started, tmp_path / "draft.safetensors", {"steps": 3})
    return tmp_path / "draft.safetensors"


def test_a_file_stores_the_draft_without_embedding_and_head(target, started, file):
    drafter = load_draft(file, target)
    expected = plain(target, PROMPTS[1], max_new_tokens=20).tokens
    assert generate(target, PROMPTS[1], drafter=drafter, max_new_tokens=20).tokens == expected
    learnt = sum(weight.numel() for weight in started.parameters())
    assert file.stat().st_size < 2 * learnt + 4096 and read_about(file) == {"steps": 3}
    made = generate(
        target, PROMPTS[1], drafter=make_drafter(str(file), target), max_new_tokens=20
    )  # by its file name
    assert made.tokens == expected


@pytest.mark.parametrize(
    "other", [{"seed": 1}, {"hidden_size": 48}, {"vocab_size": 80}, {"num_heads": 2}]
)
def test_a_draft_of_another_model_is_an_error(file, other):
    with pytest.raises(BadRequest, match="another"):
        load_draft(file, tiny_model(tie_embeddings=True, **other))


def test_a_drafter_checks_its_target(target, started):
    drafter, other = HiddenState(started, target), tiny_model(tie_embeddings=True, seed=4)
    with pytest.raises(BadRequest, match="another model"):
        generate(other, PROMPTS[0], drafter=drafter, max_new_tokens=4)


def test_a_draft_works_for_the_target_in_fewer_bits(target, file):
    from labkit.model.native.decoder import accelerate, unsupported_reason

    if unsupported_reason(target.config, "int8") is not None:
        pytest.skip("no native kernels here")
    fast = accelerate(target, "int8", kv_dtype=torch.float32)
    done = generate(fast, PROMPTS[1], drafter=load_draft(file, fast), max_new_tokens=12)
    assert done.tokens == plain(fast, PROMPTS[1], max_new_tokens=12).tokens


def test_a_file_that_is_not_a_draft_is_an_error(target, file, tmp_path):
    data = file.read_bytes()
    (tmp_path / "half.safetensors").write_bytes(data[: len(data) // 2])
    from safetensors.torch import save_file

    save_file({"a": torch.zeros(2)}, tmp_path / "other.safetensors")
    for name, words in (
        ("half", "not a whole"),
        ("other", "no draft of a known kind"),
        ("none", "There is no draft"),
    ):
        with pytest.raises(BadRequest, match=words):
            load_draft(tmp_path / f"{name}.safetensors", target)


def test_an_unsupported_architecture_is_an_error():
    with pytest.raises(BadRequest, match="gemma3_text"):
        HiddenStateNet(tiny_model("gemma3_text").config, EVERY)


# ---- labkit distill --------------------------------------------------------------------------------------------

SCRIPT = """
import sys
sys.path.insert(0, "tests")
import tests.lab.distill.test_trained as here
here.small_pool(setattr)
from labkit.lab.cli import main
import labkit.lab.stack.open as load
load.load_model = lambda name="default", **_: here.speaking_model()
sys.exit(main(["distill", sys.argv[1], "--texts", "40", "--steps", sys.argv[2], "--tokens", "300", "--held-out", "1", "--json"]))
"""


def small_pool(put):
    from labkit.lab.distill import distill
    from labkit.lab.texts import training_prompts

    put(distill, "POOL", {"chat": (40, 8), "code": (8, 8), "edit": (4, 8)})
    put(distill, "MORE", {"chat": (10, 8), "functions": (5, 8)})
    put(distill, "LIBRARY_TOKENS", 500)
    put(distill, "LONGEST", 600)
    # Parsing all documents of the library takes seconds.
    few = list(islice(training_prompts.documents("code", "training"), 60))
    put(training_prompts, "documents", lambda kind, part: few)
    put(
        training_prompts,
        "_library_functions",
        cache(training_prompts._library_functions.__wrapped__),
    )


def speaking_model():
    model = tiny_model(vocab_size=256, tie_embeddings=True, max_positions=1024)
    model.tokenizer = ByteTokenizer()
    return model


def test_distill_writes_a_draft_and_its_record(cache_folder, tmp_path, monkeypatch, capsys):
    import labkit.lab.stack.open
    from labkit.lab.cli import main

    small_pool(monkeypatch.setattr)
    monkeypatch.setenv("LABKIT_NATIVE", "off")  # an empty cache folder has no kernels yet
    model = speaking_model()
    monkeypatch.setattr(labkit.lab.stack.open, "load_model", lambda name="default", **_: model)
    file = tmp_path / "draft.safetensors"
    asked = [
        "distill",
        str(file),
        "--texts",
        "20",
        "--steps",
        "4",
        "--tokens",
        "100",
        "--held-out",
        "1",
        "--json",
    ]
    assert main(asked) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["ok"] and result["file_bytes"] == file.stat().st_size and result["steps"] == 4
    assert set(result["alpha"]) == {"chat", "code", "edit", "all"}
    assert not file.with_suffix(".checkpoint").exists()
    about = read_about(file)
    assert about["recipe"]["texts"] == 20 and sum(about["prompts"].values()) == 20
    expected = plain(model, PROMPTS[1], max_new_tokens=9).tokens
    assert (
        generate(model, PROMPTS[1], drafter=load_draft(file, model), max_new_tokens=9).tokens
        == expected
    )


def test_no_held_out_prompt_is_trained_on(monkeypatch):
    from labkit.lab.distill.distill import held_out_jobs, training_jobs

    small_pool(monkeypatch.setattr)
    tokenizer = speaking_model().tokenizer
    learnt = training_jobs(tokenizer)
    assert {one.kind for one in learnt} == {"chat", "code", "edit", "functions", "library"}
    assert learnt == training_jobs(tokenizer) != training_jobs(tokenizer, seed=2)
    held_out = held_out_jobs(tokenizer, 8)
    assert len(held_out) == 24 and all(one.temperature == 0 for one in held_out)
    assert not {one.prompt for one in held_out} & {one.prompt for one in learnt}


@pytest.mark.slow
def test_a_killed_distillation_continues_to_the_same_file(tmp_path):
    def start(name, steps="60"):
        environment = os.environ | {
            "LABKIT_CACHE": str(tmp_path / f"cache-{name}"),
            "LABKIT_NATIVE": "off",
        }
        return subprocess.Popen(
            [sys.executable, "-c", SCRIPT, str(tmp_path / f"{name}.safetensors"), steps],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=Path(__file__).parents[3],
        )

    whole = start("whole")
    killed = start("killed")
    checkpoint = tmp_path / "killed.checkpoint"
    while killed.poll() is None and not checkpoint.exists():
        time.sleep(0.02)
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    assert checkpoint.exists() and not (tmp_path / "killed.safetensors").exists()
    again = start("killed")
    assert (
        whole.communicate()[0] and whole.returncode,
        again.communicate()[0] and again.returncode,
    ) == (0, 0)
    from safetensors.torch import load_file

    one, two = load_file(tmp_path / "whole.safetensors"), load_file(tmp_path / "killed.safetensors")
    assert all(torch.equal(one[name], two[name]) for name in one)


@pytest.mark.parametrize("there", ["model", "folder", "text"])
def test_a_file_that_is_not_a_draft_is_not_replaced(tmp_path, there):
    file = tmp_path / "mine.safetensors"
    if there == "folder":
        file.mkdir()
    elif there == "text":
        file.write_text("mine")
    else:
        save_tensors(file, {"weight": torch.ones(2)})
    with pytest.raises(
        BadRequest,
        match="is a folder" if there == "folder" else "not replaced; choose another name",
    ):
        distill(tiny_model(), file, Recipe())
    assert there == "folder" or file.stat().st_size


def test_a_quantized_model_is_an_error_before_any_work(tmp_path):
    model = tiny_model(hidden_size=64, intermediate_size=64)
    quantize_model(model, "int8")
    with pytest.raises(BadRequest, match="is quantized; give the model"):
        distill(model, tmp_path / "draft.safetensors", Recipe())


def test_a_recipe_that_is_not_valid_is_an_error():
    for settings in ({"kind": "eagle"}, {"texts": 0}, {"held_out": 65}):
        (name,) = settings
        with pytest.raises(BadRequest, match=f"{name} is .*; give"):
            Recipe(**settings)
