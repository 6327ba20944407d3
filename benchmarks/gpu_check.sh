#!/usr/bin/env bash
# GPU tests, planner against real memory and time, calibration: under 9 minutes on one GPU. Works without a network:
# wheels that the machine lacks are taken from ./wheels where that folder exists.
# OUT names a folder for the result; by default it goes to benchmarks/results/.
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}
if [ -d wheels ]; then
  "$PYTHON" -m pip install --quiet --no-index --no-deps --find-links wheels wheels/*.whl
fi
export PYTHONPATH="$PWD/src:$PWD/tests" HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
exec "$PYTHON" benchmarks/gpu_check.py ${OUT:+--out "$OUT/gpu-check.json"} "$@"
