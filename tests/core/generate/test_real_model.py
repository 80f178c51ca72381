"""The default model: the same greedy tokens as transformers in float32, alone and in one batch."""

import pytest
import torch

from labkit.generate import generate

NEW = 64

CODE = '''import csv
from collections import defaultdict


def totals_by_month(path):
    """Sum the amounts of a CSV file (columns date, amount) for each month."""
    totals = defaultdict(float)
    with open(path, newline="") as file:
        for row in csv.DictReader(file):
'''

STORY = """The lighthouse keeper had not spoken to anyone for eleven days when the boat came round the point. She was \
small and grey and low in the water, and she made no sound at all. He put down the lamp he had been cleaning and \
went out on the gallery to look. """

RULES = "".join(
    f"Rule {i}. {who} must {what} before {when}, unless {why}.\n"
    for i, (who, what, when, why) in enumerate(
        [
            (
                "The tenant",
                "report any damage to the roof or the windows",
                "the end of the week",
                "it is a holiday",
            ),
            (
                "The landlord",
                "repair the heating at their own cost",
                "the first of October",
                "the part is on order",
            ),
            (
                "A visitor",
                "sign the book that lies at the front door",
                "going up the stairs",
                "a tenant is with them",
            ),
            (
                "The caretaker",
                "clear the snow from the path and the steps",
                "seven in the morning",
                "it is Sunday",
            ),
            (
                "Whoever cooks",
                "open the window above the stove",
                "lighting the gas",
                "the fan is running",
            ),
            (
                "The committee",
                "publish the accounts of the house",
                "the annual meeting",
                "the members agree otherwise",
            ),
        ]
        * 4,
        start=1,
    )
)

TEXTS = {
    "one token": "The",
    "two tokens": "def f",
    "a fact": "The capital of France is",
    "prose": STORY,
    "code": CODE,
    "a function": "def fibonacci(n):\n    if n < 2:\n        return n\n",
    "javascript": "// returns the largest number of a list\nfunction largest(numbers) {\n",
    "sum": "12 + 7 = 19\n23 + 8 = 31\n45 + 6 =",
    "algebra": "Solve for x: 3x + 5 = 20. First subtract 5 from both sides, which gives",
    "list": "Groceries for the week:\n- bread\n- milk\n- two onions\n-",
    "table": "| planet | moons |\n|---|---|\n| Earth | 1 |\n| Mars |",
    "json": '{"name": "Ada", "born": 1815, "languages": ["English", "French"], "works": [',
    "german": "Am Morgen ging die Sonne über den Bergen auf, und die Kinder",
    "french": "Il était une fois, dans un petit village près de la mer,",
    "spanish": "Para hacer una buena sopa de verduras se necesita",
    "greek, japanese, emoji": "Καλημέρα! おはよう! 😀 Good morning in five languages:",
    "long": RULES + "\nQuestion: what must the caretaker do, and by when?\nAnswer:",
}
CHATS = {
    "chat": "Give me three tips for learning to play the guitar.",
    "chat about code": "Write a Python function that checks whether a word is a palindrome.",
    "short answer": "What is the opposite of hot? Answer in one word.",
}


@pytest.fixture(scope="module")
def model():
    from labkit.lab.stack.open import load_model

    return load_model()


@pytest.fixture(scope="module")
def prompts(model):
    encoded = {name: model.tokenizer.encode(text) for name, text in TEXTS.items()}
    return encoded | {name: model.tokenizer.chat(text) for name, text in CHATS.items()}


def transformers_model():
    transformers = pytest.importorskip("transformers")
    from labkit.lab.stack.open import converted

    folder = converted("smollm2-135m-instruct")
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def by_transformers(theirs, prompt, new, ends):
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        out = theirs.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=new,
            do_sample=False,
            eos_token_id=list(ends),
            pad_token_id=0,
        )
    return tuple(out[0, len(prompt) :].tolist())


@pytest.mark.slow
@pytest.mark.real_model
def test_a_few_tokens_equal_transformers(model, prompts):
    theirs, ends = transformers_model(), model.config.eos_ids
    chosen = [prompts[name] for name in ("a fact", "short answer", "one token")]
    expected = [by_transformers(theirs, prompt, 8, ends) for prompt in chosen]
    assert [c.tokens for c in generate(model, chosen, max_new_tokens=8)] == expected
    assert [
        generate(model, prompt, max_new_tokens=8, cache="none").tokens for prompt in chosen
    ] == expected
    assert "Paris" in generate(model, "The capital of France is", max_new_tokens=8).text


@pytest.mark.slow
@pytest.mark.real_model
def test_twenty_prompts_equal_transformers_alone_and_in_one_batch(model, prompts):
    assert len(prompts) == 20
    lengths = sorted(map(len, prompts.values()))
    assert lengths[0] == 1 and 600 <= lengths[-1] <= 750
    theirs, ends = transformers_model(), model.config.eos_ids
    expected = {
        name: by_transformers(theirs, prompt, NEW, ends) for name, prompt in prompts.items()
    }
    del theirs
    alone = {name: generate(model, prompt, max_new_tokens=NEW) for name, prompt in prompts.items()}
    together = generate(model, list(prompts.values()), max_new_tokens=NEW)
    assert {name: c.tokens for name, c in alone.items()} == expected
    assert dict(zip(prompts, (c.tokens for c in together))) == expected
    assert {c.stop_reason for c in together} == {
        "end_token",
        "length",
    }  # some rows left the batch early
