"""The tables that soaks leave: rows, totals, versions, machine and date."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))


def write(path: Path | None, what: str, rows: list[dict[str, Any]], total: dict[str, Any], **more: Any) -> None:
    """Writes a table; None prints only."""
    from thrifty.hardware.detect import detect
    from thrifty.report.summary import versions

    print(json.dumps(total))
    if path is None:
        return
    head = {"what": what, "date": time.strftime("%Y-%m-%d"), "versions": versions()}
    result = {**head, "hardware": detect().lines(), **more, "rows": rows, "total": total}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")


def parser(description: str | None) -> argparse.ArgumentParser:
    """The options that all soaks share."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--out", type=Path, help="where the table goes")
    return made
