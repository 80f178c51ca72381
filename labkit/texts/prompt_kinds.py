"""Prompts of ten kinds, for what depends on what is being written: how much of a draft is right, how much is repeated.

    prompts("copy")            a passage to be repeated word for word           passages: the evaluation part of the library
    prompts("edit")            a function in which a name is to be changed      functions: HumanEval's solutions
    prompts("humaneval")       a function to be completed (raw text, no chat)
    prompts("chat")            everyday questions
    prompts("summary") … and "json", "list", "story", "maths", "explain"

All of it is evaluation text: nothing is calibrated or trained on it, nor on wordings like these. The order is fixed; take
every other one to measure something and hold it against the rest.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache

from labkit.errors import BadRequest
from labkit.texts.library import document, names
from labkit.texts.problems import humaneval

PASSAGE = 420  # characters, about


@dataclass(frozen=True)
class Prompt:
    kind: str
    text: str
    raw: bool = False  # the text itself, without a chat template

    def ids(self, tokenizer) -> list[int]:
        return tokenizer.encode(self.text) if self.raw else tokenizer.chat(self.text)


CHAT = (
    "Why do pigeons bob their heads?", "How do I keep basil fresh for longer?", "How do I dress for a weekend in the mountains?",
    "Explain how a zipper holds two sides together.", "My bicycle chain keeps slipping. What could be wrong?",
    "How is a ferry unlike a barge?", "How can I stop my glasses from fogging up?",
    "Tell me something interesting about lemurs.", "Is it better to take the stairs or the lift?",
    "How does a pressure cooker save time?", "Give me advice for a first night in a tent.",
    "Why does metal feel colder than wood?", "How do noise-cancelling headphones work?", "What keeps a spinning top upright?",
    "How do I politely decline an invitation?", "What are the parts of a sailing boat?",
)  # fmt: skip
STORY = (
    "Invent a brief tale in which a night watchman finds a letter.", "Write a short tale of a hedgehog who learns to swim.",
    "Tell a story that begins with an empty suitcase.", "Put the last tram at midnight into verse.",
    "Write a short scene in which two old friends meet by chance.", "Make up a goodnight tale in which a clock runs backwards.",
    "A knight is allergic to horses. Tell me what happens to him.", "Tell a story about a tailor whose coats whisper.",
)  # fmt: skip
MATHS = (
    "A shop sells pens at 3 for 2 euros. How much do 12 pens cost? Explain step by step.",
    "A train travels 180 km in 2 hours and then 60 km in 1 hour. What is its average speed? Show the steps.",
    "What is 35% of 240? Show how you compute it.", "Solve 3x + 7 = 22 and explain each step.",
    "A rectangle is 8 cm long and 5 cm wide. Find its area and its perimeter, step by step.",
    "Anna has twice as many apples as Ben. Together they have 18. How many has each? Explain.",
    "How many seconds are there in a week? Show the multiplication.", "What is the sum of the numbers from 1 to 20? Explain how.",
)  # fmt: skip
LISTS = (
    "List ten European capitals with their countries.", "List the planets of the solar system with one fact each.",
    "Give me a numbered list of twelve kitchen tools and what each is for.", "List eight musical instruments by family.",
    "Make a checklist for moving house.", "List ten common birds and their colours.", "List the months with the number of their days.",
    "Give a packing list for a week in a winter hut.",
)  # fmt: skip
FACTS = (
    "Maria Lopez, 34, lives in Madrid and works as a nurse.", "The red bicycle costs 250 euros and weighs 12 kilograms.",
    "Flight LH 123 leaves Munich at 10:15 and arrives in Oslo at 12:40.", "The novel was written by Jane Hill in 1987 and has 312 pages.",
    "Order 4711 holds three lamps, two chairs and one table.", "The meeting with Tom and Sara is on Friday at 9:30 in room 12.",
    "Max is a brown dog, 4 years old, and lives at 12 Oak Street.", "The museum opens at 9, closes at 17 and is closed on Mondays.",
)  # fmt: skip


@cache
def prompts(kind: str) -> tuple[Prompt, ...]:
    """The prompts of a kind, always in the same order."""
    if kind not in KINDS:
        raise BadRequest(f"There are no prompts of the kind {kind!r}; choose one of {', '.join(KINDS)}.")
    made = KINDS[kind]()
    return tuple(Prompt(kind, text, raw=kind == "humaneval") for text in made)


def _passages(count: int, source: str = "prose") -> list[str]:
    """Whole lines from documents of the evaluation part, one passage a document."""
    found = []
    for name in names(source, "evaluation"):
        paragraphs = [p.strip() for p in document(source, name).text.split("\n\n") if 150 <= len(p.strip()) <= PASSAGE]
        if paragraphs:
            found.append(max(paragraphs, key=len))
        if len(found) == count:
            break
    return found


def _edits() -> list[str]:
    asked = []
    for problem in humaneval()[20:]:
        code = problem.prompt.split('"""')[0].split("'''")[0].rstrip() + "\n" + problem.canonical_solution.rstrip()
        name = re.search(rf"def {problem.entry_point}\((\w+)", code)
        if name and 160 <= len(code) <= 700 and len(asked) < 16:
            asked.append(f"Rename the parameter `{name[1]}` to `value` in this function. Answer with the whole function.\n\n```python\n{code}\n```")
    return asked


KINDS = {
    "copy": lambda: [f"Write out the passage below exactly as it stands.\n\n{text}" for text in _passages(16)],
    "edit": _edits,
    "humaneval": lambda: [problem.prompt for problem in humaneval()[:16]],
    "chat": lambda: CHAT,
    "summary": lambda: [f"Summarise in two sentences:\n\n{text}" for text in _passages(24)[16:]],
    "json": lambda: [f"Turn this into JSON with sensible keys: {fact}" for fact in FACTS],
    "list": lambda: LISTS,
    "story": lambda: STORY,
    "maths": lambda: MATHS,
    "explain": lambda: [f"What does this function do?\n\n```python\n{p.prompt.split(chr(34) * 3)[0]}{p.canonical_solution}```" for p in humaneval()[100:108]],
}
