"""Test recall through a cache: read a text, then answer questions about it.

    margin = log p(first token of the right answer) - max over wrong answers of the same, in nats

An answer is right if its margin is above 0. A small model writes poor answers, but it
prefers the right one of four if it can find it. The text is read once into a cache;
then every question is a row of one batch that shares it. `contract` puts facts at set
depths of a long contract (a needle task). `who_said_what` has lines of four speakers;
the question repeats a sentence and asks for its speaker. Both test looking up and
not reasoning. Chance is one in four.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

import torch

from labkit.cache import cache_maker
from labkit.errors import BadRequest, whole_number
from labkit_course.experiments.attention_weights import Watched


@dataclass(frozen=True)
class Question:
    text: str
    options: tuple[str, ...]
    right: int
    place: int  # the token of the text with which the answer's line begins


@dataclass(frozen=True)
class Recall:
    """The tokens of a text, the line of each token, and questions about the text."""

    tokens: tuple[int, ...]
    lines: tuple[int, ...]
    questions: tuple[Question, ...]


@dataclass(frozen=True)
class Answer:
    question: Question
    chosen: int
    margin: float

    @property
    def right(self) -> bool:
        return self.chosen == self.question.right


SPEAKERS = (" Anna", " Ben", " Clara", " David")
SAYINGS = (
    "We should sell the {}",
    "I have never seen the {}",
    "Somebody took my {}",
    "Please do not touch the {}",
    "Tomorrow I will paint the {}",
    "You forgot the {}",
)
THINGS = (
    "piano boat ladder mirror kettle garden wagon carpet camera window blanket guitar basket candle bridge bottle "
    "lantern pillow hammer bicycle engine curtain ticket saddle drawer fountain barrel umbrella helmet statue anchor "
    "needle trumpet cradle suitcase compass shovel pepper ribbon tractor medal puzzle whistle"
).split()


def who_said_what(tokenizer, lines: int = 40, questions: int = 12, seed: int = 0) -> Recall:
    """Return `lines` sentences of four interleaved speakers, and evenly spread questions."""
    if not 1 <= whole_number(questions, "questions") <= whole_number(lines, "lines") <= len(THINGS):
        raise BadRequest(
            f"There are {lines} lines and {questions} questions; give 1 to {len(THINGS)} lines, and no more "
            "questions than lines."
        )
    random = Random(seed)
    things = random.sample(THINGS, lines)
    order = random.sample(range(len(SPEAKERS)), len(SPEAKERS))
    said = [
        (f'"{random.choice(SAYINGS).format(thing)}," said', order[i * len(order) // lines])
        for i, thing in enumerate(things)
    ]
    text = _Text(tokenizer)
    places = [text.add(f"{sentence}{SPEAKERS[who]}.\n") for sentence, who in said]
    asked = [(2 * i + 1) * lines // (2 * questions) for i in range(questions)]
    return text.recall(Question(said[i][0], SPEAKERS, said[i][1], places[i]) for i in asked)


SUBJECTS = ("tenant", "landlord", "agent", "neighbour")
DUTIES = (
    "keep the {} clean",
    "repair the {} in time",
    "pay for the {}",
    "insure the {}",
    "leave the {} as it was",
    "lock the {} at night",
)
FACTS = (
    ("The key of the cellar is kept by Mr", (" Smith", " Brown", " Jones", " Taylor")),
    ("The colour of the front door is", (" purple", " orange", " silver", " pink")),
    ("The garden may be used every", (" Friday", " Monday", " Tuesday", " Sunday")),
    ("The rent is paid in the currency of", (" Japan", " Canada", " Norway", " India")),
    ("The only pet allowed is a", (" rabbit", " parrot", " turtle", " monkey")),
)


def contract(tokenizer, clauses: int = 44, seed: int = 0) -> Recall:
    """Return numbered clauses; five of them, spread evenly, are facts."""
    if whole_number(clauses, "clauses") < 2 * len(FACTS):
        raise BadRequest(f"The contract has {clauses} clauses; give at least {2 * len(FACTS)}.")
    random, text, asked = Random(seed), _Text(tokenizer), []
    at = {round(i * (clauses - 2) / (len(FACTS) - 1)): fact for i, fact in enumerate(FACTS)}
    for number in range(clauses):
        if number in at:
            words, options = at[number]
            right = random.randrange(len(options))
            place = text.add(f"{number + 1}. {words}{options[right]}.\n")
            asked.append(Question(words, options, right, place))
        else:
            duty = random.choice(DUTIES).format(random.choice(THINGS))
            text.add(f"{number + 1}. The {random.choice(SUBJECTS)} must {duty}.\n")
    return text.recall(asked)


class _Text:
    def __init__(self, tokenizer):
        self.tokenizer, self.tokens, self.lines, self.count = tokenizer, [], [], 0

    def add(self, line: str) -> int:
        start, ids = len(self.tokens), self.tokenizer.encode(line)
        self.tokens += ids
        self.lines += [self.count] * len(ids)
        self.count += 1
        return start

    def recall(self, questions) -> Recall:
        return Recall(tuple(self.tokens), tuple(self.lines), tuple(questions))


@torch.inference_mode()
def ask(
    model, recall: Recall, make_cache: str | Callable, chunk: int = 64
) -> tuple[list[Answer], Watched]:
    """Read the text in chunks into a cache, then ask all questions at once.

    Returns the answers and the watched cache.
    """
    maker = cache_maker(make_cache)
    if maker is None:
        raise BadRequest('The cache "none" stores nothing; choose another cache.')
    chunk = whole_number(chunk, "chunk", 1)
    encode = model.tokenizer.encode
    questions = [encode(question.text) for question in recall.questions]
    counts = [len(ids) for ids in questions]
    capacity = len(recall.tokens) + max(counts)
    cache = maker(
        model.config.kv_shape, batch=1, capacity=capacity, dtype=model.dtype, device=model.device
    )
    for piece in torch.tensor([recall.tokens], device=model.device).split(chunk, 1):
        model.hidden_states(piece, cache)
    cache.select([0] * len(questions))
    rows = torch.tensor(
        [ids + [0] * (max(counts) - len(ids)) for ids in questions], device=model.device
    )
    watched = Watched(cache)
    logits = model(rows, watched, counts, last_only=True)[:, -1].float().log_softmax(-1)  # [B, V]
    return judged(recall.questions, logits, encode), watched


def judged(
    questions: Sequence[Question], log_probs: torch.Tensor, encode: Callable
) -> list[Answer]:
    """Return answers from the distributions [B, V] after the questions.

    If all questions have the same options, the mean of each option over the questions is
    subtracted first, because a model prefers some names for every text.
    """
    rows = []
    for question, row in zip(questions, log_probs):
        first = [encode(option)[0] for option in question.options]
        if len(set(first)) < len(first):
            raise BadRequest(
                f"Two of the answers {question.options} begin with the same token; choose others."
            )
        rows.append(row[first])
    if len(rows) > 1 and len({question.options for question in questions}) == 1:
        mean = torch.stack(rows).mean(0)
        rows = [row - mean for row in rows]
    return [_answer(question, row.tolist()) for question, row in zip(questions, rows)]


def _answer(question: Question, scores: list[float]) -> Answer:
    chosen = max(range(len(scores)), key=scores.__getitem__)
    wrong = max(value for i, value in enumerate(scores) if i != question.right)
    return Answer(question, chosen, scores[question.right] - wrong)


def share_right(answers: Sequence[Answer]) -> float:
    return sum(answer.right for answer in answers) / len(answers)


def mean_margin(answers: Sequence[Answer]) -> float:
    return sum(answer.margin for answer in answers) / len(answers)


def by_line(recall: Recall, weights: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Sum attention weights [B, S] over the tokens of each line of the text: [B, lines]."""
    lines = torch.tensor(recall.lines, device=weights.device)
    inside = positions < len(lines)
    found = weights.new_zeros(weights.shape[0], max(recall.lines) + 1)
    return found.scatter_add_(1, lines[positions.where(inside, 0)], weights * inside)


def best_head(recall: Recall, watched: Watched) -> tuple[int, int]:
    """Return the (layer, head) with the most weight on the lines with the answers."""
    lines = torch.tensor([recall.lines[question.place] for question in recall.questions])
    best = (-1.0, 0, 0)
    for layer in watched.queries:
        weights, positions = watched.weights(layer)
        for head in range(weights.shape[1]):
            on_line = by_line(recall, weights[:, head], positions)
            found = float(on_line.gather(1, lines[:, None].to(on_line.device)).mean())
            best = max(best, (found, layer, head))
    return best[1:]
