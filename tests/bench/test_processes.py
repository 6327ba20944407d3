"""Fresh processes: what they return, and what becomes of one that dies."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from typing import Any

import pytest

from thrifty.bench import clock
from thrifty.bench.measure import Job, Outcome
from thrifty.bench.processes import FreshProcesses
from thrifty.errors import InputError


def job(arm: str) -> Job:
    return Job(kind="speed", arm=arm, run={})


def pretend(job: Job) -> Outcome:
    if job.arm == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if job.arm == "exit":
        print("the last line", flush=True)
        os._exit(7)
    if job.arm == "error":
        raise ZeroDivisionError("by nothing")
    if job.arm == "memory":
        raise MemoryError("no more")
    return Outcome(steps=os.getpid(), curve=[(1, 2, 3.0, 4.0)])


def test_every_job_has_a_process_of_its_own() -> None:
    processes = FreshProcesses("fork", run=pretend)
    found = [processes.run(job("fine")) for _ in range(2)]
    assert found[0].curve == [(1, 2, 3.0, 4.0)]
    assert len({os.getpid(), *(one.steps for one in found)}) == 3


SERVERS = """
import json, os
from thrifty.bench.measure import Job, Outcome
from thrifty.bench.processes import FreshProcesses

def parent(job):
    return Outcome(steps=os.getppid(), tokens=hash("the seed of hashing"))

if __name__ == "__main__":
    processes = FreshProcesses("forkserver", run=parent)
    seconds, job = processes.server_seconds, Job(kind="speed", arm="fine", run={})
    found = [processes.run(job) for _ in range(2)]
    processes.renew()
    found.append(processes.run(job))
    print(json.dumps({"seconds": seconds, "found": [[one.steps, one.tokens, one.reason] for one in found]}))
"""


def test_a_renewed_server_is_another_process_with_another_seed(tmp_path) -> None:
    script = tmp_path / "servers.py"
    script.write_text(SERVERS)
    settings = {key: value for key, value in os.environ.items() if key != "PYTHONHASHSEED"}
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, env=settings, check=True)
    said = json.loads(done.stdout.splitlines()[-1])
    first, same, other = said["found"]
    assert said["seconds"] > 0
    assert first == same
    assert [first[2], other[2]] == [None, None]
    assert first[0] != other[0]
    assert first[1] != other[1]


def take_turns(job: Job) -> Outcome:
    """Notes when each of its six steps begins and ends."""
    if job.arm == "error":
        raise ZeroDivisionError("by nothing")
    steps = []
    for step in range(6 if job.arm != "short" else 2):
        if step % 2 == 0 and clock.turns is not None:
            clock.turns.wait()
        if job.arm == "killed" and step == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        begin = time.monotonic()
        time.sleep(0.002)
        steps.append((step, 0, begin, time.monotonic()))
    return Outcome(curve=steps, steps=os.getpid())


def test_processes_take_turns_and_never_run_at_once() -> None:
    arms = ["a", "short", "b", "error", "killed"]
    found = FreshProcesses("fork", run=take_turns).run_together([job(arm) for arm in arms], 2)
    first, short, second, error, killed = found
    assert "ZeroDivisionError" in str(error.reason)
    assert "SIGKILL" in str(killed.reason)
    assert [len(one.curve) for one in (first, short, second)] == [6, 2, 6]
    assert len({os.getpid(), first.steps, second.steps, short.steps}) == 4
    spans = sorted((begin, end, one.steps) for one in (first, short, second) for _, _, begin, end in one.curve)
    assert all(end <= begin for (_, end, _), (begin, _, _) in itertools.pairwise(spans))
    owners = [owner for _, _, owner in spans]
    a, c, b = first.steps, short.steps, second.steps
    assert owners == [a, a, c, c, b, b, a, a, b, b, a, a, b, b]


@pytest.mark.parametrize(
    ("arm", "parts", "crashed"),
    [
        ("killed", ["SIGKILL", "ran out of memory"], True),
        ("exit", ["exit code 7", "the last line"], True),
        ("error", ["ZeroDivisionError: by nothing"], True),
        ("memory", ["MemoryError"], False),
    ],
)
def test_a_process_that_fails_gives_a_reason(arm: str, parts: list[str], crashed: bool) -> None:
    found = FreshProcesses("fork", run=pretend).run(job(arm))
    assert found.crashed is crashed
    for part in parts:
        assert part in str(found.reason)


def test_state_survives_a_cut_off_line_and_refuses_another_bench(tmp_path: Any) -> None:
    from thrifty.bench.state import State

    state = State(tmp_path, {"a": 1})
    state.add("speed/x/0", Outcome(step_seconds=0.5))
    state.note("plan", {"rounds": 3})
    with open(state.path, "ab") as file:
        file.write(b'{"job": "speed/x/1", "outco')
    again = State(tmp_path, {"a": 1})
    assert again.outcomes["speed/x/0"].step_seconds == 0.5
    assert list(again.outcomes) == ["speed/x/0"]
    assert again.notes == {"plan": {"rounds": 3}}
    again.add("speed/x/1", Outcome())
    assert len(State(tmp_path, {"a": 1}).outcomes) == 2
    with pytest.raises(InputError, match="another bench"):
        State(tmp_path, {"a": 2})
    assert not State(tmp_path, {"a": 2}, fresh=True).resumed
    state.path.write_text("nonsense\n")
    with pytest.raises(InputError, match="damaged"):
        State(tmp_path, {"a": 2})
