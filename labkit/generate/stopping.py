"""Text as it becomes certain: characters that straddle tokens, and stop strings that straddle them too.

A byte-level token may end in the middle of a character, so text is only taken up to a complete one. Of that,
the longest end that could be the beginning of a stop string is held back until more text decides. What was
given out is therefore never taken back, and together it is exactly the final text. Generation stops with the
first token that completes a stop string; the text is cut before the string that starts earliest.

Cost: a token looks at its own characters and those held back, not at the whole text.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from labkit.errors import BadRequest


def checked_stop(stop: str | Sequence[str] | None) -> tuple[str, ...]:
    """Stop strings as a tuple, or a refusal."""
    strings = () if stop is None else (stop,) if isinstance(stop, str) else stop
    strings = tuple(strings) if isinstance(strings, Iterable) else (None,)
    if not all(isinstance(string, str) and string for string in strings):
        raise BadRequest(f"The stop strings are {stop!r}; give one or several texts of at least one character.")
    return strings


class TextStream:
    """The text of one row: `push` tokens, read what each makes certain; `text` is all that was given out.

    `decoder` (a model's `StreamDecoder`) gives the characters that are whole by now from `push(token)`, the rest
    from `finish()`.
    """

    def __init__(self, decoder, stop: Sequence[str] = ()):
        self.decoder, self.stop = decoder, tuple(stop)
        self.text = ""
        self._held = ""  # characters that may begin a stop string

    def push(self, token: int) -> tuple[str, bool]:
        """The text made certain by `token`, and whether a stop string is now complete (then nothing follows)."""
        return self._release(self.decoder.push(token))

    def finish(self) -> str:
        """What was still held back, when nothing more will come."""
        out, _ = self._release(self.decoder.finish())
        rest, self._held = self._held, ""
        self.text += rest
        return out + rest

    def _release(self, new: str) -> tuple[str, bool]:
        text = self._held + new
        found = [at for at in map(text.find, self.stop) if at >= 0]
        if found:
            out, self._held = text[: min(found)], ""
        else:
            hold = max((_overlap(text, string) for string in self.stop), default=0)
            out, self._held = text[: len(text) - hold], text[len(text) - hold :]
        self.text += out
        return out, bool(found)


def _overlap(text: str, string: str) -> int:
    """The longest proper beginning of `string` with which `text` ends."""
    for size in range(min(len(text), len(string) - 1), 0, -1):
        if text.endswith(string[:size]):
            return size
    return 0
