"""One of two gloo processes that train what they are told, job after job, until their input ends.

Each writes READY when they have found each other. A job is a line of JSON: methods, arguments of the run, and where
rank 0 leaves the weights.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
import traceback
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import torch.distributed as dist

import thrifty
import tiny
from faults import exhaust
from streams import Stateful


def work(job: dict) -> dict:
    build = tiny.BY_TASK[job["task"]] if "task" in job else tiny.FAMILIES[job.get("family", "llama")]
    if "stream" in job:
        run: Any = thrifty.Trainer(
            build(layers=2, dropout=0.1),
            tiny.arguments(job["folder"], **job["arguments"]),
            train_dataset=Stateful(job["stream"]),
            data_collator=tiny.collate_text,
        )
    else:
        run = tiny.trainer(job["folder"], job["methods"], build(layers=2), **job["arguments"])
    seen: list[list[int]] = []
    original = run.get_batch_samples

    def get_batch_samples(*args: Any) -> Any:
        batches, items = original(*args)
        seen.append([int(i) for batch in batches for i in batch.get("sample_id", [])])
        return batches, items

    run.get_batch_samples = get_batch_samples
    fault = dict(job.get("exhaust") or {})
    if fault and fault.pop("rank") == dist.get_rank():
        exhaust(run, **fault)
    told = io.StringIO()
    with contextlib.redirect_stdout(told):
        run.train(resume_from_checkpoint=job.get("resume"))
    of_all: list[Any] = [None, None]
    dist.all_gather_object(of_all, (seen, told.getvalue()))
    weights = tiny.weights(run.model)
    agreed = []
    for tensor in weights.values():
        other = tensor.clone()
        dist.broadcast(other, src=0)
        agreed.append(torch.equal(other, tensor))
    if dist.get_rank() == 0:
        torch.save(weights, job["out"])
    steps = [[first, second] for first, second in zip(of_all[0][0], of_all[1][0], strict=True)]
    told = [text for _, text in of_all]
    return {
        "agreed": all(agreed),
        "losses": tiny.losses(run),
        "world": run.args.world_size,
        "seen": steps,
        "told": told,
    }


def main() -> None:
    dist.init_process_group("gloo")
    print("READY", flush=True)
    for line in sys.stdin:
        try:
            answer = work(json.loads(line))
        except Exception:
            answer = {"error": traceback.format_exc()}
        print("ANSWER " + json.dumps(answer), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
