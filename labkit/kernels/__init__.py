"""Implementations of operations: a plain one (the oracle) and faster ones."""
