"""One of two gloo processes that train what they are told, job after job, until their input ends.

A job is a line of JSON: methods, arguments of the run, and where rank 0 leaves the weights.
"""

from __future__ import annotations

import json
import sys
import traceback
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import torch.distributed as dist

import tiny


def work(job: dict) -> dict:
    run = tiny.trainer(
        job["folder"], job["methods"], tiny.FAMILIES[job.get("family", "llama")](layers=2), **job["arguments"]
    )
    run.train(resume_from_checkpoint=job.get("resume"))
    weights = tiny.weights(run.model)
    agreed = []
    for tensor in weights.values():
        other = tensor.clone()
        dist.broadcast(other, src=0)
        agreed.append(torch.equal(other, tensor))
    if dist.get_rank() == 0:
        torch.save(weights, job["out"])
    return {"agreed": all(agreed), "losses": tiny.losses(run), "world": run.args.world_size}


def main() -> None:
    dist.init_process_group("gloo")
    for line in sys.stdin:
        try:
            answer = work(json.loads(line))
        except Exception:
            answer = {"error": traceback.format_exc()}
        print("ANSWER " + json.dumps(answer), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
