"""Plain decoding: sampling, stopping, streaming, and the loop that every ratio in the lab is measured against."""

from labkit.generate.completion import Completion, Token
from labkit.generate.loop import decode, generate, stream
from labkit.generate.sampling import InvalidLogits, Sampling

__all__ = ["Completion", "InvalidLogits", "Sampling", "Token", "decode", "generate", "stream"]
