"""Streaming and stop strings against a plain recomputation from the whole text, token by token."""

import random
from itertools import takewhile

import pytest

from labkit.errors import BadRequest
from labkit.generate.stopping import TextStream, checked_stop
from labkit.model.tokenizer import StreamDecoder

ENDINGS = [b"", b"a"] + [bytes([b]) * n for b in (0x80, 0x90, 0xBF) for n in (1, 2, 3)]


def certain(tokenizer, tokens):
    """The characters that stay the same whatever bytes follow."""
    data = b"".join(tokenizer.pieces[token] for token in tokens)
    texts = [(data + ending).decode("utf-8", errors="replace") for ending in ENDINGS]
    return "".join(chars[0] for chars in takewhile(lambda chars: len(set(chars)) == 1, zip(*texts)))


def plainly(tokenizer, tokens, stop):
    """(number of tokens until it stops or None, what may have been given out after each token, the final text)."""
    given = []
    for n in range(1, len(tokens) + 1):
        text = certain(tokenizer, tokens[:n])
        found = [text.find(s) for s in stop if s in text]
        if found:
            return n, [*given, text[: min(found)]], text[: min(found)]
        # the longest end of the text that some stop string could begin with must be held back
        held = max((k for s in stop for k in range(len(s)) if text.endswith(s[:k])), default=0)
        given.append(text[: len(text) - held])
    text = tokenizer.decode(tokens)
    found = [text.find(s) for s in stop if s in text]
    return None, given, text[: min(found)] if found else text


def streamed(tokenizer, tokens, stop):
    stream, given = TextStream(StreamDecoder(tokenizer), stop), []
    for n, token in enumerate(tokens, 1):
        new, stopped = stream.push(token)
        given.append((given[-1] if given else "") + new)
        assert stream.text == given[-1]
        if stopped:
            return n, given, stream.text
    rest = stream.finish()
    assert stream.text == given[-1] + rest
    return None, given, stream.text


STOPS = [
    (),
    ("END",),
    ("END#", "ND"),
    ("\nUser:",),
    ("aab", "ab"),
    ("é",),
    ("€b", "😀"),
    ("日本s", "本"),
    ("aaaa",),
    ("the the",),
    ("b", "ab", "cab"),
    (".",),
]


@pytest.mark.parametrize("stop", STOPS, ids=repr)
@pytest.mark.parametrize("kind", ["any token", "mostly a few letters", "bytes of characters"])
def test_random_tokens_stream_and_stop_as_the_whole_text_says(tokenizer, stop, kind):
    dice = random.Random(repr((stop, kind)))
    near = [
        i
        for i, piece in enumerate(tokenizer.pieces)
        if piece and any(piece in s.encode() for s in stop)
    ]
    pool = {
        "any token": range(96),
        "mostly a few letters": near * 3 + [tokenizer.pieces.index(b"a")] if near else range(3, 60),
        "bytes of characters": [
            i for i, piece in enumerate(tokenizer.pieces) if any(b > 127 for b in piece)
        ]
        + near,
    }[kind]
    for _ in range(150):
        tokens = [dice.choice(pool) for _ in range(dice.randint(1, 25))]
        assert streamed(tokenizer, tokens, stop) == plainly(tokenizer, tokens, stop)


@pytest.mark.parametrize("stop", ["END", "\nUser:", "é", "€", "😀", "日本", "the END# ü"])
def test_a_stop_string_is_found_however_it_is_cut_into_tokens(tokenizer, stop):
    dice, found = random.Random(0), 0
    for _ in range(300):
        data, tokens = ("cab" + stop + "def").encode(), []
        while data:
            fitting = [
                i for i, piece in enumerate(tokenizer.pieces) if piece and data.startswith(piece)
            ]
            tokens.append(dice.choice(fitting))
            data = data[len(tokenizer.pieces[tokens[-1]]) :]
        n, _, text = streamed(tokenizer, tokens, (stop,))
        assert text == "cab"
        assert stop in tokenizer.decode(tokens[:n])
        assert stop not in tokenizer.decode(tokens[: n - 1])
        found += n < len(tokens)
    assert found > 100


def test_the_beginning_of_a_stop_string_is_given_out_once_it_is_none(tokenizer):
    stream = TextStream(StreamDecoder(tokenizer), ("END#",))
    texts = [
        stream.push(token)[0]
        for token in map(tokenizer.pieces.index, (b"a", b"EN", b"D", b"END", b"b"))
    ]
    assert texts == ["a", "", "", "END", "ENDb"]


@pytest.mark.parametrize("stop", ["", ["a", ""], [3], [None]])
def test_stop_strings_must_be_texts(stop):
    with pytest.raises(BadRequest, match="stop is"):
        checked_stop(stop)


def test_one_text_or_several():
    assert (checked_stop(None), checked_stop("ab"), checked_stop(["a", "b"])) == (
        (),
        ("ab",),
        ("a", "b"),
    )
