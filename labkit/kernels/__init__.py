"""Implementations of operations: a plain one as the reference, and faster ones."""
