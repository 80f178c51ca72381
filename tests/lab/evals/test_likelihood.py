"""Likelihoods of answers: their tokens are right, and their sums are those of one plain pass."""

from __future__ import annotations

import pytest
import torch
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from labkit.errors import BadRequest
from labkit.lab.evals.likelihood import NotScorable, Reader, Split, continuation_ids, fit, split
from labkit.model.tokenizer import Tokenizer

CORPUS = [
    "Answer: A B C D",
    "Question: the answer is A\nAnswer: B",
    "Antwort: der Hund\n\nthe dog",
] * 3


def toy(kind: str, **options) -> Tokenizer:
    """Three tokenizers: the space merged into the word behind it, the space a token of its own, a space put in front."""
    if kind == "space merged":
        backend = Backend(models.BPE())
        backend.pre_tokenizer, backend.decoder = (
            pre_tokenizers.ByteLevel(add_prefix_space=False),
            decoders.ByteLevel(),
        )
        from tokenizers.trainers import BpeTrainer

        backend.train_from_iterator(
            CORPUS, BpeTrainer(vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
        )
    elif kind == "space separate":
        letters = sorted(pre_tokenizers.ByteLevel.alphabet())
        backend = Backend(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
        backend.pre_tokenizer, backend.decoder = (
            pre_tokenizers.ByteLevel(add_prefix_space=False),
            decoders.ByteLevel(),
        )
    else:
        pieces = sorted(
            {c for text in CORPUS for c in text.replace(" ", "▁")}
            | {f"<0x{b:02X}>" for b in range(256)}
        )
        pieces += ["▁A", "▁B", "▁C", "▁D"]
        vocabulary = {piece: i for i, piece in enumerate(["<unk>", *pieces])}
        backend = Backend(
            models.BPE(
                vocabulary,
                [("▁", letter) for letter in "ABCD"],
                unk_token="<unk>",
                byte_fallback=True,
            )
        )
        backend.normalizer = normalizers.Sequence(
            [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        )
        backend.decoder = decoders.Sequence(
            [
                decoders.Replace("▁", " "),
                decoders.ByteFallback(),
                decoders.Fuse(),
                decoders.Strip(" ", 1, 0),
            ]
        )
    if options.get("add_bos"):
        backend.add_special_tokens([AddedToken("<s>", special=True)])
        options["bos_id"] = backend.token_to_id("<s>")
    return Tokenizer(backend, **options)


KINDS = ("space merged", "space separate", "space in front")


@pytest.mark.parametrize("add_bos", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_continuation_ids_are_the_tail_of_the_whole_string(kind, add_bos):
    tokenizer, prompt = toy(kind, add_bos=add_bos), "Question: the answer is A\nAnswer:"
    parts = split(tokenizer, prompt, [" A", " B", " the dog", "\n\nthe"])
    for answer, tail in zip([" A", " B", " the dog", "\n\nthe"], parts.tails):
        whole = tokenizer.encode(prompt + answer)
        assert list(parts.context + tail) == whole and tail
    assert parts.context == tuple(tokenizer.encode(prompt))  # nothing merges over this border
    assert (parts.context[0] == tokenizer.bos_id) == add_bos
    short = split(tokenizer, prompt, [" A", " B"]).tails
    assert {len(tail) for tail in short} == ({2} if kind == "space separate" else {1})


def test_a_token_across_the_border_belongs_to_all_answers():
    tokenizer = toy("space merged")
    parts = split(
        tokenizer, "Question: the", [" dog", "r Hund"]
    )  # "the" alone, or what merges with "r"
    for answer, tail in zip([" dog", "r Hund"], parts.tails):
        assert list(parts.context + tail) == tokenizer.encode("Question: the" + answer)
    prompt = "the d"
    merged = split(tokenizer, prompt, ["og"])
    assert len(merged.context) < len(tokenizer.encode(prompt))  # " dog" is one token


@pytest.mark.parametrize("kind", KINDS)
def test_after_a_chat_template_no_space_and_no_bos_is_added(kind):
    tokenizer = toy(kind)
    ids = continuation_ids(tokenizer, "A dog")
    before = tokenizer.encode("x\n", add_bos=False)
    assert tokenizer.decode(before + ids) == "x\nA dog"
    parts = split(tokenizer, before, ["A", "B"])
    assert parts.context == tuple(before)


def test_an_empty_answer_or_an_empty_prompt_raises():
    tokenizer = toy("space separate")
    with pytest.raises(BadRequest, match="1 are empty"):
        split(tokenizer, "x", ["a", ""])
    with pytest.raises(BadRequest, match="no token before"):
        split(tokenizer, "", ["a"])


def plain(model, context, tail) -> float:
    ids = torch.tensor([[*context, *tail]])
    log_probs = model(ids)[0].double().log_softmax(-1)
    return sum(float(log_probs[len(context) + i - 1, token]) for i, token in enumerate(tail))


TAILS = ((5,), (7, 8, 9), tuple(range(10, 16)), (200,) * 140)


def test_likelihoods_are_those_of_one_plain_pass(byte_model):
    context = tuple(range(40, 70))
    found = Reader(byte_model).log_likelihoods(Split(context, TAILS), header=11)
    for one, tail in zip(found, TAILS):
        assert one == pytest.approx(plain(byte_model, context, tail), rel=1e-5)


def test_earlier_prompts_do_not_change_a_likelihood(byte_model):
    first, second = (
        Split(tuple(range(30)), TAILS[:3]),
        Split((*range(20), *range(90, 130)), TAILS[:3]),
    )
    alone = [Reader(byte_model).log_likelihoods(parts, 20) for parts in (first, second)]
    reader = Reader(byte_model)
    assert [reader.log_likelihoods(parts, 20) for parts in (first, second)] == alone
    assert [reader.log_likelihoods(parts, 20) for parts in (second, first, second)] == [
        alone[1],
        alone[0],
        alone[1],
    ]


def test_the_header_is_computed_once(byte_model):
    seen, reader = [], Reader(byte_model)
    byte_model.register_forward_pre_hook(lambda _, given: seen.append(tuple(given[0].shape)))
    for last in range(3):
        reader.log_likelihoods(Split((*range(20), last), ((5,), (6,))), header=20)
    assert seen == [(1, 20), (1, 1), (1, 1), (1, 1)]  # and answers of one token cost nothing


def test_through_another_cache_in_chunks(byte_model):
    from labkit.cache import ContiguousCache

    seen = []
    byte_model.register_forward_pre_hook(lambda _, given: seen.append(given[0].shape[1]))
    parts = Split(tuple(range(40)), TAILS[:3])
    chunked = Reader(byte_model, ContiguousCache, 16).log_likelihoods(parts, header=10)
    assert max(seen[:3]) == 16
    for one, other in zip(chunked, Reader(byte_model).log_likelihoods(parts)):
        assert one == pytest.approx(other, rel=1e-5)


def test_a_long_context_is_trimmed_from_the_left():
    a, b, c, d, e, bos = range(6)
    cut = fit(Split((a, b, c), ((d, e),)), limit=3)
    assert (
        cut.context == (b, c) and cut.tails == ((d, e),) and cut.trimmed == 1
    )  # reads b c d, scores d and e
    assert fit(Split((a, b, c), ((d, e),)), limit=4).trimmed == 0
    kept = fit(Split((bos, a, b, c), ((d, e),)), limit=4, bos_id=bos)
    assert kept.context == (bos, b, c)
    with pytest.raises(NotScorable, match="no room for its prompt"):
        fit(Split((a, b, c), ((d, e, d, e),)), limit=3)


def test_writing_does_not_read_the_prompt_twice_and_raises_without_room(make_byte_model):
    model = make_byte_model(max_positions=32)
    prompt = "The dog and"
    from labkit.generate import generate

    expected = generate(model, prompt, max_new_tokens=6).tokens
    reader = Reader(model)
    reader.log_likelihoods(split(model.tokenizer, prompt, [" a", " cat"]))
    seen = []
    model.register_forward_pre_hook(lambda _, given: seen.append(given[0].shape[1]))
    assert reader.write(prompt, 6).tokens == expected
    assert set(seen) == {1}
    assert reader.write(prompt, 6).tokens == expected  # and from nothing
    with pytest.raises(NotScorable, match="no room"):
        reader.write(prompt, 40)


def test_nan_raises(byte_model):
    with torch.no_grad():
        byte_model.head.weight[:] = float("nan")
    with pytest.raises(NotScorable, match="NaN"):
        Reader(byte_model).log_likelihoods(Split((1, 2), ((3,),)))
