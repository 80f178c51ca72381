"""Measure a trained draft on unseen prompts: alpha and tokens per pass, alone and after look-up.

    python data/make_draft.py draft.safetensors            prints the table
    python data/make_draft.py draft.safetensors --ship     makes it the draft that labkit ships, with its record

Decoding is greedy in float32, so the numbers are counts and do not depend on the machine.
`labkit bench speculate` measures the time.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

from labkit.files import data_path
from labkit.generate import generate
from labkit.lab.bench.speculate import total
from labkit.lab.stack.open import load_model
from labkit.lab.tables import table
from labkit.lab.texts.prompt_kinds import prompts
from labkit.speculate import LookupFirst, load_draft
from labkit.speculate.trained import read_about

KINDS = ("humaneval", "chat", "edit")
LENGTHS = {"draft": 4, "lookup_draft": 8}  # tokens drafted per pass


def acceptance_rows(
    target, file: Path, count: int = 16, new_tokens: int = 64, on_row=lambda row: None
) -> list[dict]:
    """Return one row per drafter and kind of prompt, over `count` prompts of each kind."""
    draft, rows = load_draft(file, target), []
    for name, drafter in (("draft", draft), ("lookup_draft", LookupFirst(draft))):
        for kind in KINDS:
            chosen = prompts(kind)[:count]
            done = [
                generate(
                    target,
                    prompt.ids(target.tokenizer),
                    drafter=drafter,
                    draft_length=LENGTHS[name],
                    max_new_tokens=new_tokens,
                )
                for prompt in chosen
            ]
            whole = total(done)
            rows.append(
                {
                    "drafter": name,
                    "kind": kind,
                    "draft_length": LENGTHS[name],
                    "prompts": len(chosen),
                    "tokens": len(whole.tokens) - 1,
                    "alpha": round(whole.alpha, 3),
                    "tokens_a_pass": round(whole.accepted_length, 2),
                }
            )
            on_row(rows[-1])
    return rows


def ship(file: Path, rows: list[dict]) -> None:
    """Copy the draft and its record into data/; the record keeps its entries on other drafts."""
    place, record = data_path("draft.json"), read_about(file)
    others = (
        json.loads(place.read_text(encoding="utf-8")).get("others", {}) if place.is_file() else {}
    )
    if file.resolve() != data_path("draft.safetensors"):
        shutil.copyfile(file, data_path("draft.safetensors"))
    record |= {"file_bytes": file.stat().st_size, "acceptance": rows, "others": others}
    place.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    """Run the command above."""
    parser = argparse.ArgumentParser(
        description="Alpha and tokens a pass of a trained draft on held-out prompts."
    )
    parser.add_argument("file", type=Path)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--ship", action="store_true")
    asked = parser.parse_args()
    rows = acceptance_rows(
        load_model(),
        asked.file,
        asked.prompts,
        asked.new_tokens,
        on_row=lambda row: print(row, flush=True),
    )
    print(table(tuple(rows[0]), [tuple(map(str, row.values())) for row in rows]))
    if asked.ship:
        ship(asked.file, rows)


if __name__ == "__main__":
    main()
