"""A tokenizer whose tokens cut characters and stop strings in awkward places."""

import pytest

PIECES = [
    b"",
    b"",
    b"",  # 0 pad, 1 BOS, 2 end: special, no text
    *(bytes([c]) for c in b"abcdefgh .:\nEND#Us"),
    *(bytes([b]) for b in "é€😀".encode()),
    b"\x82\xac",
    b"a\xe2",
    b"\xf0\x9f",
    b"\xff",
    b"\x98\x80b",
    b"the ",
    b"END",
    b"EN",
    b"\nUs",
    b"er:",
    b"ND#",
    b" ab",
    b"##",
    b"\n\n",
    b"cab",
    b"def",
    b"\xc3\xa9\xc3",
    b"\xbc",
    "ü".encode(),
    "日本".encode(),
    b"stop",
    b"st",
    b"op",
    b"o",
    b"p",
    b"s",
    b"t",
    b"r",
    b"re",
    b"!",
    b"?",
    b"0",
    b"1",
]


class ByteTokenizer:
    """Token ids are places in PIECES (ids beyond it are single letters); encoding takes the longest piece."""

    bos_id, eos_ids, special_ids, vocab_size, drops_first_space = 1, (2,), (0, 1, 2), 96, False
    pieces = PIECES + [bytes([65 + i % 26]) for i in range(96 - len(PIECES))]

    def encode(self, text, add_bos=None):
        data, ids = text.encode(), []
        while data:
            best = max(
                (i for i, piece in enumerate(self.pieces) if piece and data.startswith(piece)),
                key=lambda i: (len(self.pieces[i]), -i),
            )
            ids.append(best)
            data = data[len(self.pieces[best]) :]
        return ids

    def token_bytes(self, id):
        return self.pieces[id]

    def decode(self, ids, skip_special=True, continues=False):
        return b"".join(self.pieces[i] for i in ids).decode("utf-8", errors="replace")


@pytest.fixture
def tokenizer():
    return ByteTokenizer()
