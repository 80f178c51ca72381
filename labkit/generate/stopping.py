"""Text as it becomes certain: characters that straddle tokens, and stop strings that straddle them too.

A byte-level token may end in the middle of a character, so text is only taken up to a complete one. Of that,
the longest end that could be the beginning of a stop string is held back until more text decides. What was
given out is therefore never taken back, and together it is exactly the final text. Generation stops with the
first token that completes a stop string; the text is cut before the string that starts earliest.

Cost: each token decodes the few tokens since the last complete character, not the whole text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from labkit.errors import BadRequest

UNFINISHED = "\ufffd"  # what decoding gives for the bytes of a character that is not complete


def checked_stop(stop: str | Sequence[str] | None) -> tuple[str, ...]:
    """Stop strings as a tuple, or a refusal."""
    strings = () if stop is None else (stop,) if isinstance(stop, str) else tuple(stop)
    if not all(isinstance(string, str) and string for string in strings):
        raise BadRequest(f"The stop strings are {stop!r}; give one or several texts of at least one character.")
    return strings


class TextStream:
    """The text of one row: `push` tokens, read what each makes certain; `text` is all that was given out."""

    def __init__(self, decode: Callable[[list[int]], str], stop: Sequence[str] = ()):
        self.decode, self.stop = decode, tuple(stop)
        self.text = ""
        self._held = ""  # complete characters that may begin a stop string
        self._tokens: list[int] = []
        self._context = 0  # decoding restarts here, at a complete character, ...
        self._read = 0  # ... and the text up to here has been taken

    def push(self, token: int) -> tuple[str, bool]:
        """The text made certain by `token`, and whether a stop string is now complete (then nothing follows)."""
        self._tokens.append(token)
        return self._release(self._complete(final=False))

    def finish(self) -> str:
        """What was still held back, when nothing more will come."""
        out, _ = self._release(self._complete(final=True))
        rest, self._held = self._held, ""
        self.text += rest
        return out + rest

    def _complete(self, final: bool) -> str:
        """Characters completed since the last call."""
        before = self.decode(self._tokens[self._context : self._read])
        now = self.decode(self._tokens[self._context :])
        if len(now) <= len(before) or (now.endswith(UNFINISHED) and not final):
            return ""
        # Decoding starts one taken stretch back, since a decoder may treat the first token of a text differently.
        self._context, self._read = self._read, len(self._tokens)
        return now[len(before) :]

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
