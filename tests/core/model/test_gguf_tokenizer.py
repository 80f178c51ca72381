"""Compare the two kinds of GGUF tokenizers with independent implementations."""

from __future__ import annotations

import io
import json

import pytest
from tokenizers import Regex, normalizers, pre_tokenizers

from labkit.model.files.gguf import GGUFFile
from labkit.model.files.gguf_tokenizer import tokenizer_from_gguf
from labkit.model.tiny import tiny_model

# GGUF, byte-level: the hub's own way of saying each rule is the oracle.
_LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
HUB_RULES = {
    "gpt-2": pre_tokenizers.ByteLevel(add_prefix_space=False),
    "smollm": pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    ),
    "llama-bpe": pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(_LLAMA3), "isolated"), _BYTES]
    ),
    "qwen2": pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(_LLAMA3.replace("{1,3}", "")), "isolated"), _BYTES]
    ),
}


def stored(backend, pre, **more):
    """Return the metadata of a byte-level tokenizer as llama.cpp's converter writes it."""
    size = backend.get_vocab_size()
    model = json.loads(backend.to_str())["model"]
    merges = [" ".join(m) if isinstance(m, list) else m for m in model["merges"]]
    tokens = [backend.id_to_token(i) for i in range(size)]
    types = [3 if backend.get_added_tokens_decoder().get(i) else 1 for i in range(size)]
    return {
        "model": "gpt2",
        "pre": pre,
        "tokens": tokens,
        "token_type": types,
        "merges": merges,
        **more,
    }


@pytest.mark.parametrize("rule", HUB_RULES)
def test_byte_level_from_gguf_equals_the_hubs_rule(
    tmp_path, write_gguf, train_byte_level, texts, rule
):
    theirs = train_byte_level(pre=HUB_RULES[rule])
    if rule == "qwen2":
        theirs.normalizer = normalizers.NFC()
    path = write_gguf(tmp_path / "m.gguf", tiny_model(num_layers=1), tokenizer=stored(theirs, rule))
    ours = tokenizer_from_gguf(GGUFFile(path))
    for text in texts:
        assert (
            ours.encode(text, add_bos=False) == theirs.encode(text, add_special_tokens=False).ids
        ), text
    assert ours.special_ids == set(theirs.get_added_tokens_decoder())
    assert ours.add_bos == (rule == "llama-bpe")


def test_bos_rule_and_chat_template_of_the_file_are_read(tmp_path, write_gguf, train_byte_level):
    backend = train_byte_level()
    stored_ = stored(
        backend, "llama-bpe", add_bos_token=False, chat_template="{{ messages[0].content }}"
    )
    ours = tokenizer_from_gguf(
        GGUFFile(write_gguf(tmp_path / "a.gguf", tiny_model(num_layers=1), tokenizer=stored_))
    )
    assert ours.add_bos is False and ours.decode(ours.chat("x")) == "x"
    stored_ = stored(backend, "smollm", add_bos_token=True)
    ours = tokenizer_from_gguf(
        GGUFFile(write_gguf(tmp_path / "b.gguf", tiny_model(num_layers=1), tokenizer=stored_))
    )
    assert ours.encode("hi")[0] == ours.bos_id == 1
    assert ours.backend.encode("hi").ids == ours.encode(
        "hi"
    )  # the saved tokenizer.json says the same to others


def test_sentencepiece_from_gguf_equals_sentencepiece(tmp_path, write_gguf, texts):
    sentencepiece = pytest.importorskip("sentencepiece", reason="sentencepiece is not installed")
    trained = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([line for text in texts[:3] for line in text.splitlines()] * 20),
        model_writer=trained,
        model_type="bpe",
        vocab_size=420,
        byte_fallback=True,
        character_coverage=0.98,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
        num_threads=1,
    )
    theirs = sentencepiece.SentencePieceProcessor(model_proto=trained.getvalue())
    size = theirs.vocab_size()
    kind = [
        2 if theirs.is_unknown(i) else 3 if theirs.is_control(i) else 6 if theirs.is_byte(i) else 1
        for i in range(size)
    ]
    metadata = {
        "model": "llama",
        "tokens": [theirs.id_to_piece(i) for i in range(size)],
        "token_type": kind,
        "scores": [float(theirs.get_score(i)) for i in range(size)],
        "unknown_token_id": 0,
    }
    path = write_gguf(tmp_path / "m.gguf", tiny_model(num_layers=1), tokenizer=metadata)
    ours = tokenizer_from_gguf(GGUFFile(path))
    assert ours.add_bos
    for text in texts:
        want = theirs.encode(text)
        assert ours.encode(text) == [1, *want], text
        assert ours.decode([1, *want]) == theirs.decode(want) == text
        for start in range(len(want)):  # a continuation keeps the space that it begins with
            assert (
                ours.decode(want[:start]) + ours.decode(want[start:], continues=start > 0) == text
                or start == 0
                or "\ufffd" in ours.decode(want[:start])
            )
    assert any("<0x" in ours.backend.id_to_token(i) for i in ours.encode("🦄 ж"))
    assert ours.decode(ours.encode("🦄 ж")) == "🦄 ж"


def merged_by_score(text, scores):
    """Merge the neighbours that form the piece with the best score, leftmost first, until none is left."""
    pieces = list("▁" + text.replace(" ", "▁"))
    while True:
        pairs = [
            (scores[a + b], -i)
            for i, (a, b) in enumerate(zip(pieces, pieces[1:]))
            if a + b in scores
        ]
        if not pairs:
            break
        at = -max(pairs)[1]
        pieces[at : at + 2] = [pieces[at] + pieces[at + 1]]
    return [
        p
        for piece in pieces
        for p in ([piece] if piece in scores else [f"<0x{b:02X}>" for b in piece.encode()])
    ]


def test_sentencepiece_from_gguf_equals_merging_by_score(tmp_path, write_gguf):
    """The scores do not follow the length, and two different pairs form one piece."""
    words = ["ab", "bc", "abc", "▁a", "▁ab", "▁abc", "cd", "abcd", "▁▁", "bcd", "da"]
    letters = ["▁", *"abcd"]
    scores = {piece: -1000.0 for piece in letters} | {
        word: -float(i * 7 % 11) for i, word in enumerate(words)
    }
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), *scores]
    values = [0.0] * (3 + 256) + list(scores.values())
    types = [2, 3, 3] + [6] * 256 + [1] * len(scores)
    metadata = {
        "model": "llama",
        "tokens": tokens,
        "scores": values,
        "token_type": types,
        "unknown_token_id": 0,
    }
    ours = tokenizer_from_gguf(
        GGUFFile(write_gguf(tmp_path / "m.gguf", tiny_model(num_layers=1), tokenizer=metadata))
    )
    for text in ["abcd", "abc bcd", "  ab  cd", "dabcdabc", "a", "ab🙂cd", "aé", "bcdabcdbcda   a"]:
        want = [tokens.index(piece) for piece in merged_by_score(text, scores)]
        assert ours.encode(text) == [1, *want], text
        assert ours.decode(want) == text
        ids = ours.encode(text, add_bos=False)
        assert ours.decode(ids[:1]) + ours.decode(ids[1:], continues=True) == text
