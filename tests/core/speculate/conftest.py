"""Small models and drafters that say what a test tells them to."""

import pytest
import torch

from labkit.model.tiny import tiny_model
from labkit.speculate import Draft, Drafter


class Letters:
    """One character a token; 0 to 2 are special."""

    bos_id, eos_ids, special_ids, vocab_size, drops_first_space = (
        1,
        (2,),
        frozenset((0, 1, 2)),
        96,
        False,
    )

    def token_bytes(self, id):
        return b"" if id < 3 else bytes([30 + id])

    def encode(self, text, add_bos=None):
        return [ord(letter) - 30 for letter in text]

    def decode(self, ids, skip_special=True, continues=False):
        return b"".join(map(self.token_bytes, ids)).decode()


class Scripted(Drafter):
    """Proposes from the text that it was given for each prompt; `spoil` changes the token at these places of a draft."""

    name = "scripted"

    def __init__(self, texts, spoil=()):
        self.texts, self.spoil, self.limits = (
            {tuple(prompt): list(text) for prompt, text in texts.items()},
            set(spoil),
            [],
        )

    def propose(self, rows, limits):
        self.limits.append(list(limits))
        drafts = []
        for row, limit in zip(rows, limits):
            said = len(row.history) - len(row.prompt)
            tokens = self.texts[row.prompt][said : said + limit]
            drafts.append(
                Draft([(t + 1) % 90 if i in self.spoil else t for i, t in enumerate(tokens)])
            )
        return drafts


@pytest.fixture(scope="session")
def scripted():
    return Scripted


@pytest.fixture(scope="session")
def model():
    return tiny_model()


@pytest.fixture(scope="session")
def near():
    """A draft that agrees with `model` about half of the time."""
    made = tiny_model()
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for weight in made.parameters():
            weight.add_(0.04 * torch.randn(weight.shape, generator=generator))
    made.name = "near"
    return made


@pytest.fixture
def speaking(model):
    model.tokenizer = Letters()
    yield model
    model.tokenizer = None
