"""Clocks, bytes, bandwidth, the machine, and records; without language models."""
