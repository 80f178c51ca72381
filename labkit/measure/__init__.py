"""Clocks, bytes, bandwidth, the machine, and result records: nothing here knows what a language model is."""
