"""Two living gloo processes."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

TIMEOUT = 150.0


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
            command = [sys.executable, str(Path(__file__).parent / "contract" / "pair_worker.py")]
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
        # Two that wait for each other would wait for half an hour; a SIGTERM they would answer at a step boundary.
        watchdog = threading.Timer(TIMEOUT, lambda: [process.kill() for process in self.ranks])
        watchdog.start()
        for rank, process in enumerate(self.ranks):
            for line in process.stdout:
                if line.startswith("ANSWER "):
                    answers.append(json.loads(line.removeprefix("ANSWER ")))
                    break
            else:
                watchdog.cancel()
                pytest.fail(f"rank {rank} died: {Path(self.logs[rank].name).read_text()[-3000:]}")
        watchdog.cancel()
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
