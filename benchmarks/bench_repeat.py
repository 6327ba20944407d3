"""Does the bench say the same twice? Compares the verdicts of two results of the same bench, row by row.

    thrifty bench --output first && thrifty bench --output second
    python benchmarks/bench_repeat.py first/result.json second/result.json    # benchmarks/results/bench-repeat.json

A verdict is what a row is called: faster, slower or no difference for its speed, and better, worse or no difference
for its loss at equal tokens and at equal seconds. A row that cannot run has that as its verdict; the baselines have
none.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
WANTED = 0.95


def verdicts(result: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    """What each row of both tables is called, by `TABLE: LABEL`."""
    found = {}
    for row in result["rows"]:
        name = f"{row['table']}: {row['label']}"
        if row["reason"] is not None or row["arm"] is None:
            found[name] = {"speed": "cannot run"}
            continue
        arm = result["arms"][row["arm"]]
        if row["arm"] == "baseline":
            continue
        found[name] = {"speed": arm["verdict"]}
        for budget in ("tokens", "seconds"):
            change = (arm.get(f"loss_at_equal_{budget}") or {}).get("difference")
            if change is not None:
                zero = change["low"] <= 0 <= change["high"]
                found[name][f"loss at equal {budget}"] = (
                    "no difference" if zero else "better" if change["high"] < 0 else "worse"
                )
    return found


def compare(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """Rows with both verdicts, and how many are equal."""
    ours, theirs = verdicts(first), verdicts(second)
    rows = [
        {"row": name, "what": what, "first": said, "second": theirs[name][what]}
        for name, row in ours.items()
        for what, said in row.items()
        if what in theirs.get(name, {})
    ]
    speed = [row for row in rows if row["what"] == "speed"]
    return {
        "rows": rows,
        "speed": {"equal": sum(row["first"] == row["second"] for row in speed), "of": len(speed)},
        "loss": {
            "equal": sum(row["first"] == row["second"] for row in rows if row not in speed),
            "of": len(rows) - len(speed),
        },
    }


def main(arguments: list[str] | None = None) -> int:
    """Compares, writes the result file, and returns 0 where enough of the rows are called the same."""
    from thrifty.bench.publish import read
    from thrifty.report.files import to_json, write_atomic

    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("first")
    parser.add_argument("second")
    parser.add_argument("--out", default=str(HERE / "results" / "bench-repeat.json"))
    given = parser.parse_args(arguments)
    first, second = read(given.first), read(given.second)
    if first["run"] != second["run"]:
        raise SystemExit("the two results are of different run files")
    found = compare(first, second)
    about = {key: second[key] for key in ("label", "date", "machine", "versions")}
    result = {
        "format": "thrifty-bench-repeat/1",
        "name": f"bench-repeat-{second['name']}",
        **about,
        "first_date": first["date"],
        "plans": [first["plan"]["text"], second["plan"]["text"]],
        **found,
    }
    write_atomic(given.out, to_json(result, indent=1) + "\n")
    for what in ("speed", "loss"):
        print(f"{what}: {found[what]['equal']} of {found[what]['of']} verdicts are equal")
    equal = sum(row["first"] == row["second"] for row in found["rows"])
    return 0 if equal >= WANTED * len(found["rows"]) else 1


if __name__ == "__main__":
    sys.exit(main())
