"""Tasks: what a change to a model costs. `text` needs no generation and judges every number format."""
