"""Recall: answers are judged by the right token, the text is shared by all questions, and weights go to their lines."""

import pytest
import torch

from fakes import WordTokenizer
from labkit.cache import CACHES, windowed_cache
from labkit.errors import BadRequest
from labkit.model.tiny import tiny_model
from labkit_course.experiments import recall


@pytest.fixture(scope="module")
def model():
    made = tiny_model("llama", vocab_size=512)
    made.tokenizer = WordTokenizer()
    return made


def test_questions_are_spread_over_the_lines_and_know_where_their_answer_stands(model):
    text = recall.who_said_what(model.tokenizer, lines=12, questions=4)
    assert [text.lines[q.place] for q in text.questions] == [1, 4, 7, 10]
    for q in text.questions:
        quoted = model.tokenizer.encode(q.text)
        assert list(text.tokens[q.place : q.place + len(quoted)]) == quoted
        answer = model.tokenizer.encode(q.options[q.right] + ".")[0]
        assert text.tokens[q.place + len(quoted)] == answer


def test_the_first_clause_is_a_fact_and_another_stands_near_the_end(model):
    text = recall.contract(model.tokenizer, clauses=20)
    lines = [text.lines[q.place] for q in text.questions]
    assert lines[0] == 0 and lines[-1] == 18 and len(lines) == 5


@pytest.mark.parametrize("chunk", [7, 64])
def test_margins_are_those_of_a_pass_over_the_whole_text_each_time(model, chunk):
    text = recall.who_said_what(model.tokenizer, lines=12, questions=4)
    answers, _ = recall.ask(model, text, CACHES["contiguous"], chunk)
    found = []
    for q in text.questions:
        ids = [*text.tokens, *model.tokenizer.encode(q.text)]
        with torch.inference_mode():
            expected = model(torch.tensor([ids]))[0, -1].log_softmax(-1)
        found.append(expected[[model.tokenizer.encode(option)[0] for option in q.options]])
    for answer, q, row in zip(
        answers, text.questions, torch.stack(found) - torch.stack(found).mean(0)
    ):
        wrong = max(value for i, value in enumerate(row.tolist()) if i != q.right)
        assert answer.margin == pytest.approx(float(row[q.right]) - wrong, abs=1e-4)
        assert answer.right == (answer.margin > 0)


def test_a_name_that_is_liked_in_every_question_is_not_knowledge():
    names = ("a", "b")
    asked = [recall.Question("x", names, 0, 0), recall.Question("y", names, 1, 0)]
    log_probs = torch.tensor([[-0.1, -3.0], [-0.5, -2.0]])  # always a, but less where b is right
    encode = lambda text: [names.index(text)]  # noqa: E731
    assert [answer.right for answer in recall.judged(asked, log_probs, encode)] == [True, True]
    others = [asked[0], recall.Question("y", ("a", "b", "a b"[:1]), 1, 0)]
    with pytest.raises(BadRequest, match="same token"):
        recall.judged(others, log_probs, encode)


def test_answers_that_begin_alike_are_refused(model):
    question = recall.Question("who said", ("an a", "an b"), 0, 0)
    with pytest.raises(BadRequest, match="begin with the same token"):
        recall.ask(model, recall.Recall((1, 2, 3), (0, 0, 0), (question,)), CACHES["contiguous"])


@pytest.mark.parametrize("kind", ["contiguous", "int4", "window"])
def test_attention_by_line_is_all_there_is_less_the_question(model, kind):
    text = recall.who_said_what(model.tokenizer, lines=30, questions=3)
    _, watched = recall.ask(
        model, text, windowed_cache(16, 2) if kind == "window" else CACHES[kind]
    )
    weights, positions = watched.weights(1)
    assert weights.sum(-1).allclose(torch.ones(3, weights.shape[1]), atol=1e-5)
    lines = recall.by_line(text, weights[:, 0], positions)
    outside = (weights[:, 0] * (positions >= len(text.tokens))).sum(-1)
    assert (lines.sum(-1) + outside).allclose(torch.ones(3), atol=1e-5)
    if kind == "window":
        assert lines[:, 1:25].abs().max() == 0, "what left the window gets nothing"


def test_the_head_that_looks_hardest_is_found():
    text = recall.Recall((1, 2, 3, 4), (0, 0, 1, 1), (recall.Question("x", ("a", "b"), 0, 2),))

    class Looks:
        queries = (0, 1)

        def weights(self, layer):
            plain = torch.tensor([[[0.4, 0.4, 0.1, 0.1], [0.7, 0.1, 0.1, 0.1]]])
            plain[0, 1] = torch.tensor([0.0, 0.1, 0.5, 0.4]) if layer == 1 else plain[0, 1]
            return plain, torch.arange(4)[None]

    assert recall.best_head(text, Looks()) == (1, 1)


@pytest.mark.parametrize(
    "options",
    [
        {"chunk": 0},
        {"chunk": 1.5},
        {"chunk": None},
        {"make_cache": "none"},
        {"make_cache": "nonsense"},
        {"make_cache": None},
    ],
    ids=str,
)
def test_a_text_is_read_in_whole_chunks_into_a_cache_that_there_is(model, options):
    with pytest.raises(BadRequest):
        recall.ask(
            model, recall.who_said_what(model.tokenizer, 4, 2), **({"make_cache": "int8"} | options)
        )


@pytest.mark.parametrize(
    "make",
    [
        lambda t: recall.who_said_what(t, lines=0),
        lambda t: recall.who_said_what(t, lines=2.5),
        lambda t: recall.who_said_what(t, lines=3, questions=4),
        lambda t: recall.contract(t, clauses=9),
        lambda t: recall.contract(t, clauses="x"),
    ],
)
def test_texts_that_cannot_be_made_are_refused(model, make):
    with pytest.raises(BadRequest):
        make(model.tokenizer)
