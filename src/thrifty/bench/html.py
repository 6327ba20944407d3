"""The bench's pages: one self-contained file each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from thrifty.bench import tables
from thrifty.bench.charts import COLOURS, Bar, Curve, bar_chart, curve_chart
from thrifty.report import text

Result = Mapping[str, Any]


def render(**content: Any) -> str:
    """Fills the template: `title`, `kind`, `subtitle`, and lists of `bars`, `curves`, `tables` and `notes`."""
    import jinja2
    import markupsafe

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("thrifty.bench", "templates"), autoescape=True,
        undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    empty: dict[str, Any] = {"bars": [], "curves": [], "tables": [], "notes": []}
    filled = {**empty, **content}
    for name in ("bars", "curves"):
        # The charts escape their own texts.
        filled[name] = [{**chart, "svg": markupsafe.Markup(chart["svg"])} for chart in filled[name] if chart["svg"]]
    return environment.get_template("page.html.jinja").render(**filled)


def page(result: Result) -> str:
    """The page of a bench."""
    found = {name: arm for name, arm in result["arms"].items() if arm["reason"] is None}
    styles = {name: f"c{index % COLOURS}" for index, name in enumerate(found)}
    shown = [
        {"title": f"{name.capitalize()} table", "note": meaning, "head": tables.header(result, name), "rows": rows}
        for name, meaning in tables.MEANINGS.items()
        if (rows := tables.body(result, name))
    ]
    return render(
        title=f"What each technique buys: {result['name']}",
        kind="bench",
        subtitle=f"{result['label']} on {tables.machine_line(result)}",
        bars=[_memory(found, styles), _speed(found, styles)],
        curves=[_losses(found, styles)],
        tables=shown,
        notes=tables.notes(result),
    )


def _memory(found: Mapping[str, Any], styles: Mapping[str, str]) -> dict[str, Any]:
    bars = [
        Bar(name, arm["peak_bytes"], tables.memory(arm), style=styles[name])
        for name, arm in found.items()
        if arm.get("peak_bytes")
    ]
    return {"title": "Peak memory", "note": "of a training step; shorter is better", "svg": bar_chart("memory", bars)}


def _speed(found: Mapping[str, Any], styles: Mapping[str, str]) -> dict[str, Any]:
    bars = []
    for name, arm in found.items():
        if arm.get("tokens_per_second") is None:
            continue
        ratio = arm.get("speed") or {"median": 1.0, "low": None, "high": None}
        shown = f"×{ratio['median']:.2f}, {text.count(arm['tokens_per_second'])} tokens/s"
        bars.append(Bar(name, ratio["median"], shown, ratio["low"], ratio["high"], styles[name]))
    note = "tokens/s against the baseline, with the interval; longer is better"
    return {"title": "Speed", "note": note, "svg": bar_chart("speed", bars, mark=1.0)}


def _losses(found: Mapping[str, Any], styles: Mapping[str, str]) -> dict[str, Any]:
    curves = [
        Curve(f"{name}, seed {curve['seed'] + 1}", [(p[2], p[3]) for p in curve["points"]], styles[name])
        for name, arm in found.items()
        for curve in arm["curves"]
        if curve["budget"] == "tokens"
    ]
    return {
        "title": "Validation loss against seconds of training",
        "note": "every seed's run at equal tokens, each with its own fully decayed schedule; compilation not counted",
        "legend": [(name, styles[name]) for name, arm in found.items() if arm["curves"]],
        "svg": curve_chart("loss against seconds", curves, x_name="seconds", show_x=lambda v: f"{v:g}"),
    }


def curves_entry(
    title: str, note: str, curves: Sequence[Curve], names: Sequence[tuple[str, str]], **options: Any
) -> dict[str, Any]:
    """A chart of curves as the template takes it."""
    return {"title": title, "note": note, "legend": list(names), "svg": curve_chart(title, curves, **options)}
