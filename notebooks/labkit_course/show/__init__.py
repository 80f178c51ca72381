"""Figures, tables and sliders of the notebooks."""
