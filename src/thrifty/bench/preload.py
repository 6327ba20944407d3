"""Imported once by the server that bench processes are forked from: everything that a measurement imports.

It must not compute: a thread pool that exists before the fork would be dead in the children.
"""

# pyright: reportUnusedImport=false

from __future__ import annotations

import gc

import accelerate
import transformers.trainer

import thrifty.bench.clock
import thrifty.bench.measure
import thrifty.bench.memory
import thrifty.run.training
import thrifty.trainer
from thrifty.method import registry

__all__ = ["accelerate", "thrifty", "transformers"]

registry.discover()
gc.collect()
