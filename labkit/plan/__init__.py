"""Arithmetic on shapes: memory, time and break-even. Nothing here needs torch."""
