"""The plan as another tool's configuration.

One module a tool, each with `export(intent) -> Export`. What a tool cannot express is listed in `Export.missing`, never
dropped in silence.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from thrifty.errors import InputError, did_you_mean

if TYPE_CHECKING:
    from thrifty.planner.export.intent import Export
    from thrifty.planner.plan import Plan

TOOLS = (
    "trainer", "accelerate", "deepspeed", "megatron", "neox", "colossalai", "composer", "paddle", "torchtitan",
    "axolotl",
    "llamafactory",
)  # fmt: skip


def export_plan(plan: Plan, tool: str) -> Export:
    """Writes the chosen configuration of a plan for a tool.

    Raises:
        InputError: The tool is unknown, or nothing fits.
    """
    from thrifty.planner.export.reading import intent_of

    if tool not in TOOLS:
        raise InputError(
            f"unknown tool{did_you_mean(tool, TOOLS)}", key="export", value=tool, fix="one of " + ", ".join(TOOLS)
        )
    found = import_module(f"thrifty.planner.export.{tool}").export(intent_of(plan))
    found.check()
    return found
