"""Run files: what may stand in them, how they are read, and what is said about keys that are wrong, old or gone."""

from __future__ import annotations

from thrifty.config.run_config import RunConfig, load_config, parse_config

__all__ = ["RunConfig", "load_config", "parse_config"]
