"""Opening a model: names, recipes and kernels resolved in one place."""
