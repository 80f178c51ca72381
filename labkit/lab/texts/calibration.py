"""Calibration sequences from the text of the running Python's standard library."""

from __future__ import annotations

from collections.abc import Sequence

from labkit.errors import BadRequest
from labkit.lab.texts import calibration_text
from labkit.quant.calibrate import CODE_TO_PROSE, LENGTH, SEQUENCES, Calibration


def library_calibration(
    tokenizer,
    length: int = LENGTH,
    sequences: int = SEQUENCES,
    seed: int = 0,
    shares: Sequence[int] = CODE_TO_PROSE,
) -> Calibration:
    """Return `sequences` sequences of `length` tokens of code and documentation.

    `seed` chooses the documents; `shares` is the ratio of code to prose. Raises
    BadRequest if the library has too little text.
    """
    characters = max(200_000, 8 * length * sequences)  # a token is about four characters
    texts = [calibration_text(kind, seed, characters) for kind in ("code", "prose")]
    calibration = Calibration.from_text(texts, tokenizer, length, sequences, shares)
    if len(calibration.sequences) < sequences:
        raise BadRequest(
            f"{sequences} sequences of {length} tokens were asked for, and the library's text gives "
            f"{len(calibration.sequences)}; ask for fewer."
        )
    return calibration
