"""Two real gloo processes train what one process trains, and resume exactly."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import tiny
from thrifty.errors import NotApplicable
from thrifty.method import registry

pytestmark = pytest.mark.xdist_group("gloo pair")
NAMES = [name for name in registry.names() if registry.get(name).spec.processes]


class Pair:
    """Two living processes; a job costs no start-up."""

    def __init__(self, log: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.logs = [open(log / f"rank{rank}.log", "w+") for rank in range(2)]  # noqa: SIM115
        self.ranks = []
        for rank in range(2):
            env = {
                **os.environ,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": "2",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "OMP_NUM_THREADS": "1",
            }
            command = [sys.executable, str(Path(__file__).with_name("pair_worker.py"))]
            self.ranks.append(
                subprocess.Popen(
                    command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.logs[rank], text=True, env=env
                )
            )

    def run(self, **job) -> dict:
        for process in self.ranks:
            process.stdin.write(json.dumps(job) + "\n")
            process.stdin.flush()
        answers = []
        for rank, process in enumerate(self.ranks):
            for line in process.stdout:
                if line.startswith("ANSWER "):
                    answers.append(json.loads(line.removeprefix("ANSWER ")))
                    break
            else:
                pytest.fail(f"rank {rank} died: {Path(self.logs[rank].name).read_text()[-3000:]}")
        errors = [answer["error"] for answer in answers if "error" in answer]
        assert not errors, errors[0]
        assert all(answer["world"] == 2 for answer in answers)
        assert all(answer["agreed"] for answer in answers), "the two processes hold different weights"
        return answers[0]

    def close(self) -> None:
        for process in self.ranks:
            process.stdin.close()
        for process in self.ranks:
            process.wait(timeout=20)
        for log in self.logs:
            log.close()


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    pair = Pair(tmp_path_factory.mktemp("pair"))
    yield pair
    pair.close()


def preset(name: str) -> list:
    return [{name: dict(registry.get(name).spec.preset)}] if name else []


@pytest.mark.parametrize("name", ["", *NAMES])
def test_two_processes_equal_one(tmp_path, pair, name):
    settings = {"max_steps": 4, "optim": "sgd", "learning_rate": 0.05}
    try:
        one = tiny.trainer(tmp_path / "one", preset(name), **settings, per_device_train_batch_size=4)
    except NotApplicable:
        pytest.skip("refused on this machine")
    one.train()
    arguments = {**settings, "per_device_train_batch_size": 2}
    pair.run(methods=preset(name), folder=str(tmp_path / "two"), arguments=arguments, out=str(tmp_path / "w.pt"))
    two = torch.load(tmp_path / "w.pt", weights_only=True)
    invariant = not name or registry.get(name).spec.micro_batch_invariant
    tiny.assert_same(tiny.weights(one.model), two, atol=2e-6 if invariant else 5e-2)


@pytest.mark.parametrize("name", ["", *[n for n in NAMES if registry.get(n).spec.resumable]])
@pytest.mark.parametrize("step", [1, 8])
def test_two_processes_resume_bit_exactly(tmp_path, pair, name, step):
    """Also in the middle of the second epoch (step 8 of 6 a run through the data)."""
    try:
        tiny.trainer(tmp_path / "probe", preset(name))
    except NotApplicable:
        pytest.skip("refused on this machine")
    arguments = {"max_steps": 9, "save_strategy": "steps", "save_steps": 1, "save_total_limit": None}
    full = pair.run(methods=preset(name), folder=str(tmp_path / "full"), arguments=arguments, out=str(tmp_path / "a"))
    again = pair.run(
        methods=preset(name),
        folder=str(tmp_path / "again"),
        arguments={**arguments, "save_strategy": "no"},
        out=str(tmp_path / "b"),
        resume=str(tmp_path / "full" / f"checkpoint-{step}"),
    )
    tiny.assert_same(torch.load(tmp_path / "a", weights_only=True), torch.load(tmp_path / "b", weights_only=True))
    assert full["losses"] == again["losses"]


def test_selective_backprop_keeps_processes_in_step(tmp_path, pair):
    """Each process ranks its own samples, so two are not one; but they must not wait for each other, and must agree."""
    arguments = {"max_steps": 9, "save_strategy": "steps", "save_steps": 3}
    method = preset("selective-backprop")
    full = pair.run(methods=method, folder=str(tmp_path / "full"), arguments=arguments, out=str(tmp_path / "a"))
    assert len(full["losses"]) == 9
    pair.run(
        methods=method,
        folder=str(tmp_path / "again"),
        arguments={**arguments, "save_strategy": "no"},
        out=str(tmp_path / "b"),
        resume=str(tmp_path / "full" / "checkpoint-6"),
    )
    tiny.assert_same(torch.load(tmp_path / "a", weights_only=True), torch.load(tmp_path / "b", weights_only=True))
