"""Figures, tables and sliders of the notebooks, in one house style."""
