"""Checks for the exercises: each prints "passed", names the mistake, or says "not attempted".

A check compares an answer with the right one *and with the answers that common mistakes give*,
so its message can name the mistake. It prints one line and never raises: an unsolved exercise
must not stop a notebook. It also returns the outcome (true if passed), for those who grade.
A new check is one function that returns None for a right answer, else a sentence about the
mistake.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from math import isclose


@dataclass(frozen=True)
class Outcome:
    """The result of a check; true if passed. Notebooks do not display it a second time."""

    exercise: str
    state: str  # "passed", "not yet" or "not attempted"
    message: str

    def __bool__(self) -> bool:
        return self.state == "passed"

    def _ipython_display_(self) -> None:
        pass


class NotAttempted(Exception):
    """An answer that is still the placeholder."""


def check(exercise: str) -> Callable:
    """Turn a function `answer -> None or a sentence about the mistake` into a check that prints."""

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
    """Call the reader's function; a placeholder as its result counts as not attempted."""
    value = answer(*arguments)
    if _placeholder(value):
        raise NotAttempted
    return value


def guess(value, right, mistakes: dict, otherwise: str) -> str | None:
    """Return None if `value` is `right`, else the mistake that gives `value`, or `otherwise`.

    Whole numbers must be equal; floats may be rounded to three digits.
    """
    near = 0.0 if isinstance(right, int) else 5e-3
    if isclose(value, right, rel_tol=near):
        return None
    return next(
        (words for wrong, words in mistakes.items() if isclose(value, wrong, rel_tol=near)),
        otherwise,
    )
