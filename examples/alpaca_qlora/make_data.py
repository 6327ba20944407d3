"""Writes an instruction file in the format of Alpaca: a JSON list of `instruction`, `input`, `output`.

    python make_data.py instructions.json --count 2000

The tasks are ones whose answer a program knows, so that the file needs no download and every answer is right.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

WORDS = ["amber", "brook", "cedar", "dawn", "ember", "fern", "grove", "harbor", "iris", "juniper", "lantern", "ocean"]


def record(rng: random.Random) -> dict[str, str]:
    """One instruction with its answer."""
    words = rng.sample(WORDS, rng.randint(2, 4))
    first, second = rng.randint(2, 60), rng.randint(2, 60)
    text = " ".join(words)
    tasks = [
        ("Write the words in upper case.", text, text.upper()),
        ("Sort the words by the alphabet.", text, " ".join(sorted(words))),
        ("How many words are there?", text, str(len(words))),
        ("Give the first word.", text, words[0]),
        ("Give the last word.", text, words[-1]),
        (f"What is {first} plus {second}?", "", str(first + second)),
        (f"Which is larger, {first} or {second}?", "", str(max(first, second))),
    ]
    instruction, given, answer = rng.choice(tasks)
    return {"instruction": instruction, "input": given, "output": answer}


def main(arguments: list[str] | None = None) -> None:
    """Writes the file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("file", type=Path)
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args(arguments)
    rng = random.Random(chosen.seed)
    records = [record(rng) for _ in range(chosen.count)]
    chosen.file.write_text(json.dumps(records, indent=1) + "\n", encoding="utf-8")
    print(f"{len(records)} instructions in {chosen.file}")


if __name__ == "__main__":
    main()
