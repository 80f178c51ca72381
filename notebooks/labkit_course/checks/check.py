"""Checks for the exercises: each prints "passed", "not attempted" or a mistake.

A check compares an answer with the right answer and with the answers of common
mistakes, so its message can name the mistake. It prints one line and never raises,
because an unsolved exercise must not stop a notebook. It returns the outcome (true if
passed). To add a check, write a function that returns None for a right answer, and
otherwise a sentence about the mistake.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from math import isclose


@dataclass(frozen=True)
class Outcome:
    """The result of a check; true if passed. Notebooks do not display it again."""

    exercise: str
    state: str  # "passed", "not yet" or "not attempted"
    message: str

    def __bool__(self) -> bool:
        return self.state == "passed"

    def _ipython_display_(self) -> None:
        pass


class NotAttempted(Exception):
    """The answer is still the placeholder."""


def check(exercise: str) -> Callable:
    """Make a check that prints from a function: answer -> None, or the mistake."""

    def wrap(judge: Callable) -> Callable[..., Outcome]:
        @functools.wraps(judge)
        def checked(*answers) -> Outcome:
            try:
                if any(_placeholder(answer) for answer in answers):
                    raise NotAttempted
                mistake = judge(*answers)
            except NotAttempted:
                outcome = Outcome(
                    exercise, "not attempted", "replace the ... and run the cell again"
                )
            except Exception as error:  # of the reader's code: report it, do not stop the run
                message = f"your code raised {type(error).__name__}: {error}"
                outcome = Outcome(exercise, "not yet", message)
            else:
                state = "not yet" if mistake else "passed"
                outcome = Outcome(exercise, state, mistake or "")
            reason = f" — {outcome.message}" if outcome.message else ""
            print(f"{exercise}: {outcome.state}{reason}")
            return outcome

        return checked

    return wrap


def _placeholder(answer) -> bool:
    return answer is None or answer is ...


def attempt(answer: Callable, *arguments):
    """Call the reader's function and return its result.

    Raises NotAttempted if the result is a placeholder.
    """
    value = answer(*arguments)
    if _placeholder(value):
        raise NotAttempted
    return value


def guess(value, right, mistakes: dict, otherwise: str) -> str | None:
    """Return None if `value` equals `right`, otherwise a sentence about the mistake.

    `mistakes` maps wrong values to sentences; `otherwise` is for all other values.
    Whole numbers must be equal. Floats may differ by 0.5 %.
    """
    near = 0.0 if isinstance(right, int) else 5e-3
    if isclose(value, right, rel_tol=near):
        return None
    return next(
        (words for wrong, words in mistakes.items() if isclose(value, wrong, rel_tol=near)),
        otherwise,
    )
