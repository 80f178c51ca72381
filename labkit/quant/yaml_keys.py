"""YAML in which a key stands once: of two, the last would count and the first be lost in silence."""

from __future__ import annotations

MERGE = "tag:yaml.org,2002:merge"  # "<<" takes another mapping's keys and is none itself


def read_once(text: str) -> object:
    """What the text says, by the safe loader; ValueError names a key that is given twice."""
    import yaml

    class Once(yaml.SafeLoader):
        def construct_mapping(self, node, deep=False):
            keys = [self.construct_object(key, deep=True) for key, _ in node.value if key.tag != MERGE]
            if (twice := next((key for i, key in enumerate(keys) if key in keys[:i]), None)) is not None:
                raise ValueError(f"the key {twice!r} stands there twice")
            return super().construct_mapping(node, deep)

    return yaml.load(text, Once)
