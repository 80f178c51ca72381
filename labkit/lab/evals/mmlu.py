"""The task `mmlu`: multiple-choice questions with four answers, scored in three ways.

    text        log p(" answer" | question) / bytes of the answer. The prompt does not show the
                answers. A small model knows more than it can say, and this way shows it.
    letter      log p(" A") ... log p(" D") after the question and its four answers. The model must
                also know the convention.
    generated   the letter in the greedy completion of the same prompt. The model must also write
                the right form.

The English file has 282 questions; 281 of them have a readable answer letter and are scored.

Each way gives `right`, the `margin` of the right answer over the best wrong one (nats, or nats per
byte for text) and `mass`, the total probability of the four answers. `text` also gives the
`bits_per_byte` of the right answer. A letter score with a small mass means little. At the floor
(chance is 25 %) a share cannot fall. A margin can, so it is the primary metric.

Few-shot examples are other items of the subject. If they do not fit, whole examples are left out
and counted. NaN or four equal scores are an error of the item and not an "A".
Cost: one prompt per way of scoring and item.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from labkit.errors import Whole, check_fields
from labkit.lab.evals import check_choices
from labkit.lab.evals.likelihood import NotScorable, Reader, Split, split
from labkit.lab.evals.task import ItemScore, Metric
from labkit.lab.texts.tasks import LANGUAGES, LETTERS, MAX_SHOTS, MMLUItem, few_shot, mmlu

SCORINGS = ("text", "letter", "generated")
NEW_TOKENS = 8  # room for a letter and a few words before it
WORDS = {  # the header, and the labels of a question and its answer
    "en": (
        "The following are multiple choice questions (with answers) about {}.",
        "Question:",
        "Answer:",
    ),
    "de": ("Es folgen Multiple-Choice-Fragen mit Antworten.", "Frage:", "Antwort:"),
    "es": (
        "A continuación hay preguntas de opción múltiple con respuestas.",
        "Pregunta:",
        "Respuesta:",
    ),
    "fr": ("Voici des questions à choix multiple avec leurs réponses.", "Question :", "Réponse :"),
    "hi": ("नीचे बहुविकल्पीय प्रश्न और उनके उत्तर दिए गए हैं।", "प्रश्न:", "उत्तर:"),
    "it": ("Seguono domande a scelta multipla con risposte.", "Domanda:", "Risposta:"),
    "pt": ("Seguem perguntas de múltipla escolha com respostas.", "Pergunta:", "Resposta:"),
    "th": ("ต่อไปนี้เป็นคำถามแบบเลือกตอบพร้อมคำตอบ", "คำถาม:", "คำตอบ:"),
}

VERBS = "is|ist|est|es|é|è|because|since|weil|car|porque|perché"
NOT = "not|wrong|incorrect|false|nicht|falsch|pas|faux|fausse|incorrecta|incorreta|fals[ao]|errad[ao]|sbagliat[ao]|errat[ao]"
_LATIN = "A-Za-zÀ-ɏ\u0300-\u036f"  # Thai and Hindi may touch the letter
_ALONE = re.compile(
    rf"(?<![{_LATIN}\d])[{LETTERS}](?![{_LATIN}\d]|['’ʼ-][{_LATIN}])"
    rf"(?!(?<=A)(?<!\w\sA)\s(?!(?:{VERBS})\b)[a-zà-ÿ])(?!\s\w+\s(?:{NOT})\b)"
)


def make(model, limit: int | None = None, **options) -> MMLU:
    return MMLU(limit=limit, **options)


@dataclass(frozen=True)
class MMLU:
    """Score `limit` items per language, from as many subjects as possible.

    `reader` are options of `likelihood.Reader`, to read through another cache.
    """

    shots: int = 0
    scoring: tuple[str, ...] = ("text", "letter")
    languages: tuple[str, ...] = ("en",)
    limit: int | None = None
    seed: int = 0
    reader: dict = field(default_factory=dict)
    name = "mmlu"

    def __post_init__(self):
        check_choices(self.scoring, SCORINGS, "a way to score MMLU")
        check_choices(self.languages, LANGUAGES, "a language of MMLU")
        check_fields(self, shots=Whole(0, MAX_SHOTS))

    @property
    def metrics(self) -> tuple[Metric, ...]:
        metrics = []
        for way in self.scoring:
            margin = Metric(f"{way}_margin", "nats/byte" if way == "text" else "nats")
            right = Metric(f"{way}_right", share=True, chance=1 / len(LETTERS))
            sums = [margin, Metric(f"{way}_mass")]
            if way == "text":
                sums.append(Metric("bits_per_byte", "bits/byte", higher_is_better=False))
            if way == "generated":
                metrics += [right, Metric("generated_answered", share=True), *sums]
            else:
                metrics += [*sums, right]
        return tuple(metrics)

    def items(self) -> list[MMLUItem]:
        items = []
        for language in self.languages:
            spread = sorted(mmlu(language), key=lambda item: (item.index, item.subject))
            items += spread[: self.limit]
        return items

    def score(self, model, items: Sequence[MMLUItem]) -> Iterator[ItemScore]:
        reader = Reader(model, **self.reader)
        for item in items:
            try:
                yield self._score(reader, item)
            except NotScorable as reason:
                yield ItemScore(item.id, item.language, error=str(reason))

    def _score(self, reader: Reader, item: MMLUItem) -> ItemScore:
        metrics, details = {}, {"answer": item.answer}
        if "text" in self.scoring:
            parts, header, shown = self.prompt(reader, item, listed=False)
            nats = reader.log_likelihoods(parts, header)
            per_byte = [value / len(choice.encode()) for value, choice in zip(nats, item.choices)]
            details |= {"text": _judge(metrics, "text", nats, per_byte, item), **shown}
            right = nats[LETTERS.index(item.answer)]
            metrics["bits_per_byte"] = (-right / math.log(2), len(item.answer_text.encode()))
        listed = {"letter", "generated"} & set(self.scoring)
        if listed:
            parts, header, shown = self.prompt(reader, item, listed=True)
            nats = reader.log_likelihoods(parts, header)
            details |= shown
            for way in listed:
                details[way] = _judge(metrics, way, nats, nats, item)
        if "generated" in listed:
            written = reader.write(parts.context, NEW_TOKENS).text
            letter = generated_letter(written)
            metrics["generated_right"] = (float(letter == item.answer), 1.0)
            metrics["generated_answered"] = (float(letter is not None), 1.0)
            details |= {"generated": letter, "written": written}
        return ItemScore(item.id, item.language, metrics, details=details)

    def prompt(self, reader: Reader, item: MMLUItem, listed: bool) -> tuple[Split, int, dict]:
        """Return the prompt and the answers as ids, the header's length, and details to record."""
        tokenizer, config = reader.model.tokenizer, reader.model.config
        words, _, answer = WORDS[item.language]
        header = words.format(item.subject.replace("_", " ")) + "\n\n"
        answers = [f" {answer}" for answer in (LETTERS if listed else item.choices)]
        examples = few_shot(item, mmlu(item.language), self.shots, self.seed)
        for dropped in range(len(examples) + 1):
            shots = "".join(
                f"{asked(one, listed)}\n{answer} {one.answer if listed else one.answer_text}\n\n"
                for one in examples[dropped:]
            )
            parts = split(tokenizer, f"{header}{shots}{asked(item, listed)}\n{answer}", answers)
            length = len(parts.context) + max(map(len, parts.tails)) - 1
            if length <= config.max_positions - NEW_TOKENS * listed:
                shared = split(tokenizer, header, [asked(item, listed)])
                details = {"shots": len(examples) - dropped, "trimmed": dropped}
                return parts, len(shared.context), details
        room = f"the model's context of {config.max_positions} tokens"
        raise NotScorable(f"The question alone is longer than {room}.")


def _judge(metrics: dict, way: str, nats: Sequence[float], scores, item: MMLUItem) -> str:
    """Add the metrics of one way of scoring and return the letter of the chosen answer."""
    right, chosen = LETTERS.index(item.answer), best(scores)
    wrong = max(score for i, score in enumerate(scores) if i != right)
    metrics[f"{way}_right"] = (float(item.choices[chosen] == item.answer_text), 1.0)
    metrics[f"{way}_margin"] = (scores[right] - wrong, 1.0)
    metrics[f"{way}_mass"] = (math.fsum(map(math.exp, nats)), 1.0)
    return LETTERS[chosen]


def asked(item: MMLUItem, listed: bool) -> str:
    """Return the question, with its answers if `listed`."""
    lines = [f"{WORDS[item.language][1]} {item.question}"]
    if listed:
        lines += [f"{letter}. {choice}" for letter, choice in zip(LETTERS, item.choices)]
    return "\n".join(lines)


def best(scores: Sequence[float]) -> int:
    """Return the index of the first highest score.

    Raises NotScorable if a score is NaN or if all scores are equal.
    """
    if any(math.isnan(score) for score in scores):
        raise NotScorable("A score is NaN, so no answer can be chosen.")
    if len(scores) > 1 and len(set(scores)) == 1:
        raise NotScorable(f"All {len(scores)} scores are equal, so no answer can be chosen.")
    return max(range(len(scores)), key=scores.__getitem__)


def generated_letter(text: str) -> str | None:
    """Return the first letter that stands alone, as in "(C)" or "D. because ...", or None.

    "A" at the start of a sentence is a word, as in "A good choice is B", unless one of VERBS
    follows. A letter with NOT after it is not the answer, as in "A is wrong, D is right".
    """
    match = _ALONE.search(text)
    return match[0] if match else None
