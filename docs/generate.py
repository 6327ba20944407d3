"""Generates the pages and tables that come from the code: `python docs/generate.py`; `--check` only compares."""

from __future__ import annotations

import inspect
import re
import sys
from pathlib import Path

import measured
import tables
from thrifty.cli.methods import settings_of
from thrifty.method import Method, card_of, registry

ROOT = Path(__file__).resolve().parents[1]
MARKS = re.compile(r"(<!-- generated: methods -->\n).*?(<!-- /generated -->)", re.S)


def pages() -> dict[Path, str]:
    """Every generated file with its text."""
    made = {ROOT / "docs/methods" / f"{name}.md": method_page(registry.get(name)) for name in registry.names()}
    made[ROOT / "docs/methods/index.md"] = "# The methods\n\n" + table(prefix="") + "\n"
    readme = ROOT / "README.md"
    made[readme] = MARKS.sub(lambda m: m[1] + overview("docs/methods/") + "\n" + m[2], readme.read_text("utf-8"))
    made |= tables.result_pages() | measured.pages()
    for page in [readme, *sorted((ROOT / "docs").rglob("*.md"))]:
        text = made.get(page) or page.read_text("utf-8")
        if tables.MARKS.search(text):
            made[page] = tables.filled(text)
    return made


def overview(prefix: str) -> str:
    """The names of all methods, a row for each section."""
    sections: dict[str, list[str]] = {}
    for name in registry.names():
        sections.setdefault(registry.get(name).spec.section, []).append(f"[`{name}`]({prefix}{name}.md)")
    rows = [f"| {section.replace('_', ' ')} | {', '.join(names)} |" for section, names in sections.items()]
    return "\n".join(["| section | methods |", "|---|---|", *rows])


def table(prefix: str) -> str:
    """The list of methods, by section."""
    lines = ["| section | method | what it does | result loads as |", "|---|---|---|---|"]
    last = None
    for name in registry.names():
        cls = registry.get(name)
        section = cls.spec.section.replace("_", " ")
        shown = section if section != last else ""
        last = section
        loads = cls.spec.saves_as.replace("_", " ")
        lines.append(f"| {shown} | [`{name}`]({prefix}{name}.md) | {card_of(cls).summary} | {loads} |")
    return "\n".join(lines)


def method_page(cls: type[Method]) -> str:
    """A method's page: its card, settings, declarations and pure form."""
    spec, card = cls.spec, card_of(cls)
    lines = [f"# {spec.title}", "", f"`{spec.name}`, {spec.section.replace('_', ' ')}", ""]
    for head, text in card.parts.items():
        lines += [f"**{head}.** {text[:1].upper() + text[1:]}", ""]
    settings = settings_of(cls)
    if settings:
        lines += ["## Settings", "", "| setting | type | default | meaning |", "|---|---|---|---|"]
        for name, setting in settings.items():
            kind = setting["type"].replace("|", "or")
            lines.append(f"| `{name}` | {kind} | `{setting['default']}` | {setting['description']} |")
        lines.append("")
    lines += ["## Declarations", ""]
    facts = {
        "leaves the mathematics of a step unchanged": "yes" if spec.exact else "no",
        "micro-batches do not matter": "yes" if spec.micro_batch_invariant else "no",
        "resumes exactly": "yes" if spec.resumable else "no",
        "result loads as": spec.saves_as.replace("_", " "),
        "slot": ", ".join(spec.claims) or "none",
        "tasks": ", ".join(spec.tasks) or "all",
        "cannot be combined with": "; ".join(f"{k} ({why})" for k, why in spec.conflicts_with.items()) or "none",
    }
    facts |= {f"on a device of the kind {kind}": f"emulated ({why})" for kind, why in spec.emulated.items()}
    lines += [f"- {key}: {value}" for key, value in facts.items()] + [""]
    module = sys.modules[cls.__module__]
    pure = [
        (name, thing)
        for name, thing in vars(module).items()
        if inspect.getmodule(thing) is module
        and (inspect.isfunction(thing) or inspect.isclass(thing))
        and thing is not cls
        and not name.startswith("_")
    ]
    if pure:
        lines += ["## In your own loop", "", f"From `{cls.__module__}`:", ""]
        for name, thing in pure:
            first = (inspect.getdoc(thing) or "").split("\n\n")[0].replace("\n", " ")
            lines.append(f"- `{name}`: {first}")
        lines.append("")
    return "\n".join(lines)


def main() -> int:
    """Writes the files, or with `--check` says which are out of date."""
    stale = []
    for path, text in pages().items():
        if not path.exists() or path.read_text("utf-8") != text:
            stale.append(path)
            if "--check" not in sys.argv:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text, encoding="utf-8")
    for path in stale:
        print(("out of date: " if "--check" in sys.argv else "wrote ") + str(path.relative_to(ROOT)))
    return 1 if stale and "--check" in sys.argv else 0


if __name__ == "__main__":
    sys.exit(main())
