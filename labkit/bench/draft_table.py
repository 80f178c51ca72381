"""What a trained draft is worth on prompts that no training saw: alpha and tokens a target pass, alone and behind look-up.

    python -m labkit.bench.draft_table draft.safetensors            prints the table
    python -m labkit.bench.draft_table draft.safetensors --ship     makes it the draft that labkit ships, with its record

Greedy, float32, so the numbers are counts and do not depend on the machine; the time that they save is `bench speculate`'s.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

from labkit.assets import data_path
from labkit.bench.harness import table
from labkit.bench.speculate import total
from labkit.model.load import load_model
from labkit.speculate import LookupFirst, generate, load_draft
from labkit.speculate.trained import read_about
from labkit.texts.prompt_kinds import prompts

KINDS = ("humaneval", "chat", "edit")
LENGTHS = {"draft": 4, "lookup_draft": 8}  # tokens drafted a pass


def acceptance_rows(target, file: Path, count: int = 16, new_tokens: int = 64, on_row=lambda row: None) -> list[dict]:
    """One row a drafter and kind of prompt, over `count` prompts of at most `new_tokens` new tokens."""
    draft, rows = load_draft(file, target), []
    for name, drafter in (("draft", draft), ("lookup_draft", LookupFirst(draft))):
        for kind in KINDS:
            chosen = prompts(kind)[:count]
            done = [generate(target, prompt.ids(target.tokenizer), drafter=drafter, draft_length=LENGTHS[name],
                             max_new_tokens=new_tokens) for prompt in chosen]  # fmt: skip
            whole = total(done)
            rows.append({"drafter": name, "kind": kind, "draft_length": LENGTHS[name], "prompts": len(chosen),
                         "tokens": len(whole.tokens) - 1, "alpha": round(whole.alpha, 3),
                         "tokens_a_pass": round(whole.accepted_length, 2)})  # fmt: skip
            on_row(rows[-1])
    return rows


def ship(file: Path, rows: list[dict]) -> None:
    """Put the draft and its record where the package finds them; what the record says of other drafts is kept."""
    place, record = data_path("draft.json"), read_about(file)
    others = json.loads(place.read_text(encoding="utf-8")).get("others", {}) if place.is_file() else {}
    if file.resolve() != data_path("draft.safetensors"):
        shutil.copyfile(file, data_path("draft.safetensors"))
    place.write_text(json.dumps({**record, "file_bytes": file.stat().st_size, "acceptance": rows, "others": others}, indent=1) + "\n",
                     encoding="utf-8")  # fmt: skip


def main() -> None:
    """The command above."""
    parser = argparse.ArgumentParser(description="Alpha and tokens a pass of a trained draft on held-out prompts.")
    parser.add_argument("file", type=Path)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--ship", action="store_true")
    asked = parser.parse_args()
    rows = acceptance_rows(load_model(), asked.file, asked.prompts, asked.new_tokens, on_row=lambda row: print(row, flush=True))
    print(table(tuple(rows[0]), [tuple(map(str, row.values())) for row in rows]))
    if asked.ship:
        ship(asked.file, rows)


if __name__ == "__main__":
    main()
