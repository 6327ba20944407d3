"""Loads saved models in a process where this package cannot be imported, job after job, until its input ends."""

from __future__ import annotations

import json
import sys
import traceback

import torch
import transformers


def logits(folder: str, saves_as: str, auto: str, inputs: dict[str, list]) -> list[float]:
    if saves_as == "peft":
        from peft import AutoPeftModelForCausalLM

        model = AutoPeftModelForCausalLM.from_pretrained(folder)
    else:
        model = getattr(transformers, auto).from_pretrained(folder, trust_remote_code=saves_as == "remote_code")
    model.eval()
    with torch.no_grad():
        output = model(**{key: torch.tensor(value) for key, value in inputs.items()})
    return (output.logits if "logits" in output else output.logits_per_text).flatten().tolist()


def main() -> None:
    sys.modules["thrifty"] = None  # type: ignore[assignment]  # the result must load without it
    for line in sys.stdin:
        try:
            answer = {"logits": logits(**json.loads(line))}
        except Exception:
            answer = {"error": traceback.format_exc()}
        print("ANSWER " + json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
