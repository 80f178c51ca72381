"""What the notebooks show: figures, tables, sliders and exercise checks, in one house style."""
