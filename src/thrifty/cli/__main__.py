"""`python -m thrifty.cli`, for launchers that start a module."""

from __future__ import annotations

import sys

from thrifty.cli.app import main

sys.exit(main())
