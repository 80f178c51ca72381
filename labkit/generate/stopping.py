"""Stream text and find stop strings; characters and stop strings may span tokens.

A byte-level token may end in the middle of a character, so the stream returns only
complete characters. If their end could begin a stop string, the stream keeps that end
until the next tokens decide. So returned text never changes, and all returned pieces
together are exactly the final text. Generation stops with the first token that completes
a stop string. The text is cut before the stop string that starts first.

Cost per token: its own characters and the kept ones, not the whole text.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from labkit.errors import BadRequest
from labkit.model.tokenizer import StreamDecoder


def checked_stop(stop: str | Sequence[str] | None) -> tuple[str, ...]:
    """Return stop strings as a tuple; raise BadRequest for anything else."""
    strings = () if stop is None else (stop,) if isinstance(stop, str) else stop
    strings = tuple(strings) if isinstance(strings, Iterable) else (None,)
    if not all(isinstance(string, str) and string for string in strings):
        raise BadRequest(f"stop is {stop!r}; give one or more texts of at least one character.")
    return strings


class TextStream:
    """The text of one row, token by token.

    `decoder` turns tokens into complete characters. `text` is all the text returned so
    far.
    """

    def __init__(self, decoder: StreamDecoder, stop: Sequence[str] = ()):
        self.decoder, self.stop = decoder, tuple(stop)
        self.text = ""
        self._waiting = ""  # characters that may begin a stop string

    def push(self, token: int) -> tuple[str, bool]:
        """Add a token; return the text that it completes, and whether a stop string is complete."""
        return self._release(self.decoder.push(token))

    def finish(self) -> str:
        """Return the rest of the text; call this when no token follows."""
        text, _ = self._release(self.decoder.finish())
        rest, self._waiting = self._waiting, ""
        self.text += rest
        return text + rest

    def _release(self, new: str) -> tuple[str, bool]:
        text = self._waiting + new
        starts = [start for start in map(text.find, self.stop) if start >= 0]
        end = min(starts) if starts else len(text) - self._overlap(text)
        self._waiting = "" if starts else text[end:]
        self.text += text[:end]
        return text[:end], bool(starts)

    def _overlap(self, text: str) -> int:
        """Return the length of the longest end of `text` that could begin a stop string."""
        sizes = (
            size
            for string in self.stop
            for size in range(1, min(len(text), len(string) - 1) + 1)
            if text.endswith(string[:size])
        )
        return max(sizes, default=0)
