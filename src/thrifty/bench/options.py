"""What a bench is asked to do."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

from thrifty.errors import InputError

MOST_ARMS = 8
"""Without a choice of methods, the tables stop at so many different recipes, the baseline among them."""
FEWEST_ROUNDS, MOST_ROUNDS = 5, 9
FEWEST_STEPS = 20


@dataclass(kw_only=True)
class Options:
    """A bench.

    Attributes:
        run: Content of the run file, flat, without methods.
        own_methods: The `methods` of the run file: techniques that are measured, not part of the baseline.
        name: Short name of the run.
        chosen: Techniques to measure in place of those that declare a place.
        only: One of the tables.
        minutes: Time for everything; the steps of a row are chosen to fit. None with `steps`.
        steps: Optimizer steps of a row's baseline run; None lets the minutes decide.
        seeds: How many seeds the losses have.
        rounds: How often the speed of every row is measured; None lets the minutes decide.
        evaluations: How often a run is evaluated on its way.
        eval_samples: Validation samples that are evaluated.
        threads: Processor threads.
        quality: Whether losses are measured, not only memory and speed.
        more: Whatever else decides what is measured.
    """

    run: dict[str, Any]
    own_methods: list[Any] = field(default_factory=list)
    name: str = "bench"
    chosen: list[Any] | None = None
    only: str | None = None
    minutes: float | None = 10.0
    steps: int | None = None
    seeds: int = 3
    rounds: int | None = None
    evaluations: int = 6
    eval_samples: int = 64
    threads: int | None = None
    quality: bool = True
    more: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        from thrifty.bench.rows import check_table

        check_table(self.only)
        for key, value, least in (
            ("--minutes", self.minutes, 0.1),
            ("--steps", self.steps, FEWEST_STEPS // 2),
            ("--seeds", self.seeds, 1),
            ("--rounds", self.rounds, 1),
            ("--threads", self.threads, 1),
        ):
            if value is not None and not value >= least:
                raise InputError("is too small", key=key, value=value, fix=f"{least} or more")
        if self.steps is not None:
            self.minutes = None

    def settings(self) -> dict[str, Any]:
        """What decides the measurements, for the fingerprint."""
        from thrifty.report.summary import versions

        own = {key: value for key, value in vars(self).items() if key != "name"}
        return {**own, "versions": versions(), "machine": platform.node()}


def read_run(path: str | None, overrides: Sequence[str] = ()) -> tuple[dict[str, Any], list[Any], str]:
    """Content without methods, methods, and name of a run file; of the bench's own without a path.

    Raises:
        InputError: The file, a key or a value is wrong.
    """
    from thrifty.config import load_config, parse_config, yaml_text
    from thrifty.config.overrides import apply_overrides

    if path is None:
        text = resources.files("thrifty.bench").joinpath("default.yaml").read_text(encoding="utf-8")
        values = apply_overrides(yaml_text.parse(text, "the bench's run file"), overrides)
        config, name = parse_config(values, name="embedded"), "embedded"
    else:
        config, name = load_config(path, overrides), Path(path).stem
    content, methods = _divided(config)
    return content, methods, name


def read_values(values: Mapping[str, Any], overrides: Sequence[str] = ()) -> tuple[dict[str, Any], list[Any]]:
    """As `read_run`, of keys that are there already."""
    from thrifty.config import parse_config
    from thrifty.config.overrides import apply_overrides

    return _divided(parse_config(apply_overrides(dict(values), overrides), name="bench"))


def _divided(config: Any) -> tuple[dict[str, Any], list[Any]]:
    import torch

    flat = config.to_dict()
    methods = list(flat.pop("methods", []))
    for key in ("output_dir", "overwrite", "resume", "sample_prompt", "num_threads"):
        flat.pop(key, None)
    if not torch.accelerator.is_available():
        flat["use_cpu"] = True  # transformers refuses bf16 on a processor that was not chosen by name
    return flat, methods
