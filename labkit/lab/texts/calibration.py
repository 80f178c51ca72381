"""Make calibration sequences from the text of Python's standard library."""

from __future__ import annotations

from labkit.errors import BadRequest
from labkit.lab.texts import calibration_text
from labkit.quant.calibrate import CODE_TO_PROSE, LENGTH, SEQUENCES, Calibration


def library_calibration(
    tokenizer, length: int = LENGTH, sequences: int = SEQUENCES, seed: int = 0
) -> Calibration:
    """Return `sequences` sequences of `length` tokens of code and documentation.

    The seed chooses the documents. Code and documentation have the shares
    `CODE_TO_PROSE`. Raises BadRequest if the library has too little text.
    """
    characters = max(200_000, 8 * length * sequences)  # a token has about four characters
    texts = [calibration_text(kind, seed, characters) for kind in ("code", "prose")]
    calibration = Calibration.from_text(texts, tokenizer, length, sequences, CODE_TO_PROSE)
    if (most := len(calibration.sequences)) < sequences:
        raise BadRequest(f"The library has text for {most} sequences, not {sequences}; give fewer.")
    return calibration
