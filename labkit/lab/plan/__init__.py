"""Plan a model: memory from its shapes, seconds from measured operators."""
