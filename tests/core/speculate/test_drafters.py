"""What each drafter promises beside the loop: vocabularies, heads, layers, lengths, turns."""

import pytest
import torch

from labkit.errors import BadRequest
from labkit.generate import Sampling, generate
from labkit.generate import generate as plain
from labkit.generate.adaptive import Pace
from labkit.lab.bench.speculation_costs import measure_costs
from labkit.model.native.decoder import accelerate, unsupported_reason
from labkit.model.tiny import tiny_config, tiny_model
from labkit.plan.time import SpeculationCosts
from labkit.speculate import (
    DRAFTERS,
    DraftModel,
    LayerSkip,
    Lookup,
    LookupFirst,
    SelfQuantized,
    make_drafter,
)
from labkit.speculate.draft_model import bytes_read
from labkit.speculate.layer_skip import without_layers
from labkit.speculate.self_quantized import frequent_ids

PROMPT = [7, 8, 9, 10, 11, 12, 13]
NEVER = ()
native = pytest.mark.skipif(
    unsupported_reason(tiny_config(), "bf16") is not None, reason="no native kernels here"
)


class Backend:
    def __init__(self, *words):
        self.words = {word: i for i, word in enumerate(words)}

    def get_vocab(self):
        return self.words


class Vocabulary:
    def __init__(self, size, first="a"):
        self.vocab_size, self.backend = size, Backend(*(f"{first}{i}" for i in range(size)))


def pair(target_width, draft_width, ours=None, theirs=None):
    target, draft = tiny_model(vocab_size=target_width), tiny_model(seed=4, vocab_size=draft_width)
    target.tokenizer, draft.tokenizer = theirs, ours
    return target, DraftModel(draft)


def proposals(target, drafter, **options):
    """Everything that was drafted in a run."""
    seen, propose = [], drafter.propose
    drafter.propose = lambda *a: (lambda drafts: (seen.extend(drafts), drafts)[1])(propose(*a))
    done = generate(
        target, PROMPT, drafter=drafter, draft_length=4, max_new_tokens=40, end_ids=NEVER, **options
    )
    assert (
        options.get("sampling")
        or done.tokens == plain(target, PROMPT, max_new_tokens=40, end_ids=NEVER).tokens
    )
    return [token for draft in seen for token in draft.tokens]


# --- vocabularies --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("widths", [(40, 32), (32, 40), (40, 40)])
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=1.5, seed=3)])
def test_padded_vocabularies_work_and_padding_is_never_drafted(widths, sampling):
    target, drafter = pair(*widths, Vocabulary(30), Vocabulary(30))
    drafter.check(target)
    target.tokenizer = drafter.model.tokenizer = None  # these know no text; the check is done
    drafter.check = lambda target: None
    drafted = proposals(target, drafter, **({"sampling": sampling} if sampling.temperature else {}))
    assert drafted and max(drafted) < 30


def test_another_tokenizer_of_the_same_size_is_an_error():
    target, drafter = pair(40, 40, Vocabulary(30), Vocabulary(30, "b"))
    with pytest.raises(BadRequest, match="different tokenizers"):
        drafter.check(target)


def test_a_wider_draft_of_unknown_words_is_an_error():
    target, drafter = pair(32, 40)
    with pytest.raises(BadRequest, match="40 ids and the target 32"):
        generate(target, PROMPT, drafter=drafter, max_new_tokens=4)


def test_a_text_that_the_draft_cannot_read_is_not_drafted_for():
    target, drafter = pair(90, 20)
    text = [*PROMPT, 80]
    wanted = plain(target, text, max_new_tokens=10, end_ids=NEVER).tokens
    done = generate(target, text, drafter=drafter, max_new_tokens=10, end_ids=NEVER)
    assert done.tokens == wanted and done.tally.drafted == 0


# --- heads and layers ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=2.0, presence_penalty=0.5)])
def test_a_trimmed_head_drafts_its_own_tokens_only(sampling):
    target, ids = tiny_model(), torch.tensor([8, 9, 27, 54, 60, 75, 89])
    drafted = proposals(
        target,
        SelfQuantized(target, ids=ids),
        **({"sampling": sampling} if sampling.temperature else {}),
    )
    assert drafted and set(drafted) <= set(ids.tolist())


def test_a_trimmed_head_saves_its_rows():
    target = tiny_model(vocab_size=960)
    whole, trimmed = SelfQuantized(target), SelfQuantized(target, ids=frequent_ids(target, 96))
    saved = bytes_read(whole.model) - bytes_read(trimmed.model)
    assert (
        saved == 864 * (32 + 4) and trimmed.cost < whole.cost
    )  # a byte a weight and a scale a row
    assert trimmed.cost == pytest.approx(bytes_read(trimmed.model) / bytes_read(target))


def test_a_model_without_layers_equals_a_smaller_model():
    target, skip = tiny_model(num_layers=5, seed=6), [1, 3]
    view, tokens = without_layers(target, skip), torch.tensor([PROMPT])
    x = target.embed_tokens(tokens)
    cos, sin = target.rotary(torch.arange(len(PROMPT))[None], (len(PROMPT),), x.dtype)
    for i in (0, 2, 4):
        x = target.layers[i](x, cos, sin)
    torch.testing.assert_close(view(tokens), target.head(target.norm(x)))
    cache = view.new_cache(1, 16)
    torch.testing.assert_close(view(tokens, cache), view(tokens), atol=1e-5, rtol=1e-5)
    assert cache.shape.num_layers == 3 and len(target.layers) == 5
    assert all(
        a is b for a, b in zip(view.layers[1].mlp.parameters(), target.layers[2].mlp.parameters())
    )


@native
def test_the_native_decoder_loses_layers_in_the_same_way():
    target = accelerate(tiny_model(num_layers=5, seed=6), "bf16", kv_dtype=torch.float32)
    view, tokens = without_layers(target, [1, 3]), torch.tensor([PROMPT])
    torch.testing.assert_close(
        view(tokens), without_layers(target.dequantized(), [1, 3])(tokens), atol=0.08, rtol=0
    )  # bf16 products
    assert target.config.num_layers == 5


@pytest.mark.parametrize("skip", [[5], [-1], range(5)])
def test_layers_that_cannot_be_left_out(skip):
    with pytest.raises(BadRequest, match="layers to skip"):
        LayerSkip(tiny_model(num_layers=5), list(skip))


@native
@pytest.mark.parametrize("name", ["self_quantized", "layer_skip", "trimmed", "lookup_first"])
def test_every_self_draft_serves_a_native_target(name):
    target = accelerate(tiny_model(num_layers=5), "bf16")
    prompts = [PROMPT, [3, 4, 3, 4]]
    wanted = [one.tokens for one in plain(target, prompts, max_new_tokens=20, end_ids=NEVER)]
    drafter = make_drafter(name, target)
    done = generate(
        target, prompts, drafter=drafter, draft_length=4, max_new_tokens=20, end_ids=NEVER
    )
    assert [one.tokens for one in done] == wanted


def test_drafting_in_the_targets_cache_agrees_more_often(monkeypatch):
    target = tiny_model(num_layers=6, seed=3)
    counts = []
    for shared in (True, False):
        monkeypatch.setattr(LayerSkip, "shares_cache", shared)
        done = [
            generate(
                target,
                [i, i + 1, i + 2],
                drafter=LayerSkip(target, [3]),
                max_new_tokens=40,
                end_ids=NEVER,
            )
            for i in range(3, 9)
        ]
        counts.append(sum(one.tally.accepted for one in done))
    assert counts[0] > counts[1]


# --- lengths and turns ---------------------------------------------------------------------------------------------


def test_lengths_follow_the_acceptance():
    """Costs that make long drafts pay while they are right, and none once they are wrong."""
    pace, costs = Pace(), SpeculationCosts(0.2, (1.0, 1.05))
    first = pace.length(costs, 12)
    for _ in range(10):
        pace.update(4, 4)
    assert pace.alpha > 0.9 and pace.length(costs, 12) > first > 0
    for _ in range(20):
        pace.update(4, 0)
    asked = [pace.length(costs, 12) for _ in range(60)]
    assert (
        pace.alpha < 0.2 and sum(asked) == 3 and max(asked) == 1
    )  # a probe after 8, 16 and 32 plain steps
    for _ in range(12):
        pace.update(1, 1)
    assert pace.length(costs, 12) > 1


def test_a_drafter_that_is_never_right_is_soon_not_asked(scripted):
    model = tiny_model()
    wrong = scripted({tuple(PROMPT): [0] * 200})
    wrong.cost = 0.3
    done = generate(
        model, PROMPT, drafter=wrong, draft_length="auto", max_new_tokens=120, end_ids=NEVER
    )
    assert done.tokens == plain(model, PROMPT, max_new_tokens=120, end_ids=NEVER).tokens
    assert done.tally.drafted < 16  # at most a few tokens to find out, and a probe now and then


def test_the_second_drafter_drafts_if_the_first_has_nothing(scripted):
    model = tiny_model()
    text = plain(model, PROMPT, max_new_tokens=30, end_ids=NEVER).tokens
    second = scripted({tuple(PROMPT): text})
    done = generate(
        model,
        PROMPT,
        drafter=LookupFirst(second, Lookup(shortest=2)),
        draft_length=3,
        max_new_tokens=30,
        end_ids=NEVER,
    )
    assert done.tokens == text and len(second.limits) < done.tally.target_passes
    assert done.drafter == "lookup, then scripted"


def test_names_make_drafters_and_others_are_errors():
    model = tiny_model(num_layers=5)
    assert make_drafter("int8_channel", model).name == "int8_channel"
    for name in set(DRAFTERS) - {"draft", "lookup_draft"}:
        assert make_drafter(name, model).name
    with pytest.raises(BadRequest, match="no drafter 'oracle'.*lookup"):
        make_drafter("oracle", model)


def test_costs_are_measured_part_by_part():
    model = tiny_model(num_layers=5)
    drafters = {
        name: make_drafter(name, model)
        for name in ("lookup", "layer_skip", "self_quantized", "lookup_first")
    }
    reads, draft = [], drafters["layer_skip"].model
    hook = draft.register_forward_pre_hook(lambda module, args: reads.append(args[0].shape[1]))
    costs = measure_costs(model, drafters, PROMPT, repeats=6, sizes=(1, 2, 5))
    hook.remove()
    assert reads[0] == len(PROMPT) + 1 and set(reads[1:]) == {
        1
    }  # the prompt once, then a token a step as in a real run
    assert costs.plain_s > 0 and len(costs.verify) == 5 and costs.verify[0] == 1.0
    assert costs.verify[3] == pytest.approx(
        costs.verify[1] + 2 * (costs.verify[4] - costs.verify[1]) / 3
    )
    assert costs.of("layer_skip").draft > costs.of("lookup").draft > 0
    assert costs.predicted_s("lookup", 0.0, 0, 10) == pytest.approx(
        10 * costs.plain_s + costs.start_s["lookup"]
    )
