"""Read and format amounts of memory: "16GiB" is 16 * 1024**3, "16GB" is 16 * 1000**3."""

from __future__ import annotations

import re

from labkit.errors import BadRequest

UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
SHORT_NAMES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}  # of dtypes


def parse_bytes(text: str | int | float) -> int:
    """Return the number of bytes in a text such as "16GiB", "1.5 GB" or "4096".

    A number is rounded to whole bytes. Raises BadRequest for other texts; "16G" is one
    of them, because it can mean GB or GiB.
    """
    written = text if isinstance(text, str) else f"{text:.0f}"
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([a-zA-Z]*)\s*", written)
    unit = match[2].upper() or "B" if match else ""
    if not match or unit not in UNITS:
        raise BadRequest(
            f"{text!r} is not an amount of memory; give a number and a unit, such as 16GiB or 16GB."
        )
    return int(float(match[1]) * UNITS[unit])


def format_bytes(count: int | float) -> str:
    """Format bytes in binary units with two decimals: 7569408000 -> '7.05 GiB'."""
    for unit, size in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(count) >= size:
            return f"{count / size:,.2f} {unit}"
    return f"{count:g} B"
