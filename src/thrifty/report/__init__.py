"""What a run leaves behind for people: metrics, progress, plots, the HTML report and the model card.

Modules are imported where they are used, so that reading a metrics file costs no plotting library:
`metrics`, `throughput`, `recorder` and `progress` (while training); `summary`, `plots`, `html` and `card` (after it).
"""

from __future__ import annotations

import os
from pathlib import Path


def write_all(run_dir: str | os.PathLike[str]) -> list[Path]:
    """Writes `loss.png`, `README.md` and `report.html` of a run whose `summary.json` is there.

    Args:
        run_dir: The run folder.

    Returns:
        The paths written, the report last.

    Raises:
        InputError: `summary.json` or `metrics.jsonl` is missing, or a file is damaged.
    """
    from thrifty.report.card import write_card
    from thrifty.report.html import write_report
    from thrifty.report.plots import write_loss_plot

    # The card shows the plot, and the report lists both.
    return [write_loss_plot(run_dir), write_card(run_dir), write_report(run_dir)]
