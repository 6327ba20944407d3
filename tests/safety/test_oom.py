"""Out of memory: the real exceptions, injected ones at every place, and what the gradients are afterwards."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from pace import share_of_a_step
from thrifty.errors import InputError
from thrifty.safety.advice import advisor, possible_changes
from thrifty.safety.oom import CannotSplit, MicroBatcher, is_oom, rng_snapshot, rows_of, split_batch

REAL_CPU_OOM = """
import json, resource, sys, torch
sys.path[:0] = sys.argv[1:]
from thrifty.safety.oom import is_oom
size = int(next(l for l in open("/proc/self/statm")).split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (size + (64 << 20),) * 2)
answers = []
big = torch.ones(8).expand(1 << 28, 8)
for attempt in (lambda: torch.zeros(1 << 28), lambda: bytearray(1 << 30), big.contiguous):
    try:
        attempt()
        answers.append(None)
    except Exception as error:
        answers.append([type(error).__name__, is_oom(error)])
print(json.dumps(answers))
"""


def test_real_cpu_exceptions_are_recognised() -> None:
    done = subprocess.run([sys.executable, "-c", REAL_CPU_OOM, *sys.path], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == [["RuntimeError", True], ["MemoryError", True], ["RuntimeError", True]]


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."), True),
        (
            RuntimeError("MPS backend out of memory (MPS allocated: 8 GB, max allowed: 9 GB). Tried to allocate 1 GB"),
            True,
        ),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("CUDA error: device-side assert triggered"), False),
        (RuntimeError("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED."), False),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("DefaultCPUAllocator: can't allocate memory"), False),
        (KeyboardInterrupt(), False),
    ],
)
def test_what_counts_as_out_of_memory(error: BaseException, expected: bool) -> None:
    assert is_oom(error) is expected


def test_split_batch_keeps_order_scalars_and_lists() -> None:
    batch = {
        "input_ids": torch.arange(10).view(5, 2),
        "mask": np.ones((5, 3)),
        "sample_id": ["a", "b", "c", "d", "e"],
        "scale": 0.5,
        "name": "batch",
        "zero_dim": torch.tensor(3),
        "none": None,
    }
    parts = split_batch(batch, 2)
    assert [rows_of({"x": p["input_ids"]}) for p in parts] == [3, 2]
    assert torch.equal(torch.cat([p["input_ids"] for p in parts]), batch["input_ids"])
    assert [p["sample_id"] for p in parts] == [["a", "b", "c"], ["d", "e"]]
    assert all(p["scale"] == 0.5 and p["name"] == "batch" and p["none"] is None and p["zero_dim"] == 3 for p in parts)
    assert parts[1]["mask"].shape == (2, 3)
    assert len(split_batch(batch, 99)) == 5
    with pytest.raises(CannotSplit, match="single sample"):
        split_batch({"input_ids": torch.ones(1, 4)}, 2)
    with pytest.raises(CannotSplit, match="no common first dimension"):
        split_batch({"input_ids": torch.ones(2, 4), "pixel_values": torch.ones(7, 3)}, 2)


def batches(count: int = 3, rows: int = 4, length: int = 12) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    ids = [torch.randint(0, 97, (rows, length), generator=generator) for _ in range(count)]
    return [{"input_ids": i, "labels": i} for i in ids]


def step_function(model: nn.Module, items: int) -> Callable[[Any, float], torch.Tensor]:
    def forward_backward(part: Any, share: float) -> torch.Tensor:
        loss = model(**part, num_items_in_batch=items).loss
        loss.backward()
        return loss.detach()

    return forward_backward


def gradients(model: nn.Module) -> list[torch.Tensor]:
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def accumulate(
    model: nn.Module, data: list[dict[str, torch.Tensor]], batcher: MicroBatcher | None = None
) -> list[float]:
    items = sum(b["labels"][:, 1:].numel() for b in data)
    function = step_function(model, items)
    if batcher is None:
        return [float(function(batch, 1.0)) for batch in data]
    batcher.begin_step()
    return [float(batcher.run(batch, function)) for batch in data]


def test_injection_at_every_part_of_the_step_gives_the_same_gradients(make_llama, inject_oom) -> None:
    data = batches()
    reference = make_llama()
    losses = accumulate(reference, data)
    expected = gradients(reference)
    model = make_llama()
    with inject_oom(10**9) as counter:
        accumulate(model, data)
    places = [1 + i * (counter.count - 1) // 19 for i in range(20)]
    for place in places:
        model.zero_grad(set_to_none=True)
        lines: list[str] = []
        batcher = MicroBatcher(model, report=lines.append)
        with inject_oom(place):
            got = accumulate(model, data, batcher)
        assert len(lines) == 1
        assert "2 rows" in lines[0]
        assert batcher.limits["training"] == (2, 12)
        assert got == pytest.approx(losses, rel=1e-5)
        for ours, theirs in zip(gradients(model), expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=2e-6)


def test_split_run_is_bitwise_the_run_with_the_smaller_micro_batch(make_llama, inject_oom) -> None:
    data = batches(count=2)
    small = make_llama()
    accumulate(small, [part for batch in data for part in split_batch(batch, 2)])
    model = make_llama()
    batcher = MicroBatcher(model, report=lambda line: None)
    with inject_oom(5):
        accumulate(model, data, batcher)
    assert all(torch.equal(a, b) for a, b in zip(gradients(model), gradients(small), strict=True))
    model.zero_grad()
    accumulate(model, data, batcher)  # the size was kept: no failure is needed any more
    assert all(torch.equal(a, b) for a, b in zip(gradients(model), gradients(small), strict=True))


def test_with_dropout_the_random_state_is_that_of_the_smaller_micro_batch(make_llama, inject_oom) -> None:
    data = batches(count=1)
    results = []
    for splits in (False, True):
        model = make_llama(attention_dropout=0.3)
        model.train()
        torch.manual_seed(5)
        if splits:
            with inject_oom(60):
                accumulate(model, data, MicroBatcher(model, report=lambda line: None))
        else:
            accumulate(model, split_batch(data[0], 2))
        results.append((gradients(model), torch.rand(3)))
    assert all(torch.equal(a, b) for a, b in zip(results[0][0], results[1][0], strict=True))
    assert torch.equal(results[0][1], results[1][1]), "the generator goes on from the same place"


def test_mean_losses_are_weighted_by_their_share(inject_oom) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))
    inputs, plain = {"x": torch.randn(5, 4)}, nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))
    plain.load_state_dict(model.state_dict())
    whole = plain(inputs["x"]).square().mean()
    whole.backward()
    expected = float(whole.detach())

    def forward_backward(part: Any, share: float) -> torch.Tensor:
        loss = model(part["x"]).square().mean() * share
        loss.backward()
        return loss.detach()

    batcher = MicroBatcher(model, report=lambda line: None)
    batcher.begin_step()
    with inject_oom(4):
        loss = batcher.run(inputs, forward_backward)
    assert float(loss) == pytest.approx(expected, rel=1e-6)
    torch.testing.assert_close(model[0].weight.grad, plain[0].weight.grad)


def test_retry_happens_after_the_graph_is_gone(llama) -> None:
    alive: list[weakref.ref[torch.Tensor]] = []
    survivors: list[int] = []

    def forward_backward(part: Any, share: float) -> torch.Tensor:
        survivors.append(sum(ref() is not None for ref in alive))
        loss = llama(**part).loss
        alive.append(weakref.ref(loss))
        if part["input_ids"].shape[0] > 1:
            raise torch.OutOfMemoryError("injected")
        loss.backward()
        return loss.detach()

    gc.disable()
    try:
        batcher = MicroBatcher(llama, report=lambda line: None)
        batcher.begin_step()
        batcher.run(batches(1)[0], forward_backward)
    finally:
        gc.enable()
    assert len(survivors) > 4
    assert survivors == [0] * len(survivors)


def test_only_the_failing_micro_batch_is_split_and_shorter_ones_are_not(llama) -> None:
    seen: list[tuple[int, int]] = []

    def forward_backward(part: Any, share: float) -> torch.Tensor:
        rows, length = part["input_ids"].shape
        seen.append((rows, length))
        if rows * length > 40:
            raise torch.OutOfMemoryError("injected")
        return torch.zeros(())

    batcher = MicroBatcher(llama, report=lambda line: None)
    batcher.begin_step()
    for length in (8, 16, 6, 16):
        batcher.run(batches(1, rows=4, length=length)[0], forward_backward)
    assert seen == [(4, 8), (4, 16), (4, 8), (2, 16), (2, 16), (4, 6), (2, 16), (2, 16)]


def test_pieces_that_an_earlier_one_has_shown_to_be_too_large_are_not_tried(llama) -> None:
    """Eight rows, two fit: 8 fails, 4 fails, and the other half of 4 is split without a failure of its own."""
    seen: list[int] = []
    lines: list[str] = []

    def forward_backward(part: Any, share: float) -> torch.Tensor:
        seen.append(part["input_ids"].shape[0])
        if seen[-1] > 2:
            raise torch.OutOfMemoryError("injected")
        return torch.tensor(share)

    batcher = MicroBatcher(llama, report=lines.append)
    batcher.begin_step()
    assert float(batcher.run(batches(1, rows=8)[0], forward_backward)) == 1.0
    assert seen == [8, 4, 2, 2, 2, 2]
    assert len(lines) == 2


def test_batch_norm_statistics_do_not_count_the_failed_attempt(inject_oom) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))

    def forward_backward(part: Any, share: float) -> torch.Tensor:
        loss = model(part["x"]).square().mean() * share
        loss.backward()
        return loss.detach()

    batcher = MicroBatcher(model, report=lambda line: None)
    batcher.begin_step()
    with inject_oom(12):
        batcher.run({"x": torch.randn(8, 4)}, forward_backward)
    assert int(model.get_buffer("1.num_batches_tracked")) == 2  # two halves, and not the whole batch besides


def test_what_is_not_memory_passes_through_untouched(llama) -> None:
    def forward_backward(part: Any, share: float) -> torch.Tensor:
        raise RuntimeError("CUDA error: device-side assert triggered")

    batcher = MicroBatcher(llama, report=lambda line: pytest.fail(line))
    with pytest.raises(RuntimeError, match="device-side assert"):
        batcher.run(batches(1)[0], forward_backward)


def test_single_sample_that_does_not_fit_names_three_changes(llama, inject_oom) -> None:
    model = llama
    batcher = MicroBatcher(model, report=lambda line: None, advise=advisor(model, object()))
    batcher.begin_step()
    with (
        pytest.raises(InputError, match=r"one sample, length 12, .*Fix: \(1\) .* \(2\) .* \(3\) ") as caught,
        inject_oom(3, times=99),
    ):
        batcher.run(batches(1)[0], step_function(model, 10))
    assert "LoRA" in str(caught.value)
    assert caught.value.key == "per_device_train_batch_size"


def test_failure_that_cannot_be_undone_is_raised(llama, inject_oom) -> None:
    batcher = MicroBatcher(llama, report=lambda line: None)
    llama.lm_head.weight.grad = torch.ones_like(llama.lm_head.weight)
    batcher.begin_step()
    with pytest.raises(InputError, match="gradients of an earlier step were kept"), inject_oom(30):
        batcher.run(batches(1)[0], step_function(llama, 10))
    batcher = MicroBatcher(llama, cannot_recover=lambda: "the optimizer runs inside backward")
    with pytest.raises(InputError, match="cannot be undone: the optimizer runs inside backward"), inject_oom(30):
        batcher.run(batches(1)[0], step_function(llama, 10))


def test_evaluation_is_split_and_its_size_is_its_own(llama, inject_oom) -> None:
    data, lines = batches(1)[0], []
    batcher = MicroBatcher(llama, report=lines.append)
    with torch.no_grad():
        whole = llama(**data).logits
        with inject_oom(20):
            pieces = batcher.evaluate(data, lambda part: llama(**part).logits)
    assert [share for share, _ in pieces] == [0.5, 0.5]
    assert "evaluation" in lines[0]
    torch.testing.assert_close(torch.cat([logits for _, logits in pieces]), whole)
    assert batcher.limits == {"training": None, "evaluation": (2, 12)}
    other = MicroBatcher(llama)
    other.load_state_dict(json.loads(json.dumps(batcher.state_dict())))
    assert other.limits == batcher.limits


PRESSURE = """
import json, resource, sys, torch
sys.path[:0] = sys.argv[1:]
from conftest import tiny_llama
from thrifty.safety.oom import MicroBatcher, split_batch
torch.set_num_threads(1)
model = tiny_llama(vocab_size=4000, max_position_embeddings=256)
g = torch.Generator().manual_seed(0)
data = [{"input_ids": torch.randint(0, 4000, (8, 128), generator=g)} for _ in range(2)]
for batch in data:
    batch["labels"] = batch["input_ids"]
def step(part, share):
    loss = model(**part, num_items_in_batch=2 * 8 * 127).loss
    loss.backward()
    return loss.detach()
small = [float(sum(step(p, 1.0) for p in split_batch(b, 8))) for b in data]
expected = [p.grad.clone() for p in model.parameters()]
model.zero_grad()
size = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (size + (40 << 20),) * 2)
lines = []
batcher = MicroBatcher(model, report=lines.append)
batcher.begin_step()
losses = [float(batcher.run(b, step)) for b in data]
worst = max(float((p.grad - e).abs().max()) for p, e in zip(model.parameters(), expected))
limit = batcher.limits["training"]
print(json.dumps({"lines": lines, "losses": losses, "small": small, "worst": worst, "limit": limit}))
"""


def test_recovers_from_real_pressure_on_the_address_space() -> None:
    here = str(__file__).rsplit("/", 1)[0]
    done = subprocess.run([sys.executable, "-c", PRESSURE, here, *sys.path], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["lines"]
    assert answer["limit"][0] < 8
    assert answer["losses"] == pytest.approx(answer["small"], rel=1e-5)
    assert answer["worst"] < 1e-5


@pytest.mark.gpu
def test_recovers_from_real_pressure_on_cuda(make_llama) -> None:
    model = make_llama(vocab_size=32000, max_position_embeddings=2048).cuda()
    data = {k: v.cuda() for k, v in batches(1, rows=64, length=1024)[0].items()}
    total = torch.cuda.mem_get_info()[1]
    torch.cuda.set_per_process_memory_fraction(min(1.0, (torch.cuda.memory_reserved() + (3 << 30)) / total))
    try:
        lines: list[str] = []
        batcher = MicroBatcher(model, report=lines.append)
        batcher.begin_step()
        batcher.run(data, step_function(model, 64 * 1023))
        assert lines
        assert batcher.limits["training"] is not None
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def test_changes_are_ordered_and_only_offered_where_they_apply(make_llama) -> None:
    class Args:
        bf16 = True
        optim = "adafactor"

    inputs = {"input_ids": torch.ones(1, 64)}
    eager = possible_changes(make_llama(attn_implementation="eager"), inputs, Args())
    texts = [change.text for change in eager]
    assert texts[0] == 'attn_implementation="sdpa"'
    assert not any("bf16" in t or "adafactor" in t for t in texts)
    assert [c.same_result for c in eager] == sorted((c.same_result for c in eager), reverse=True)
    plain = [c.text for c in possible_changes(make_llama(), inputs, object())]
    assert not any("sdpa" in t for t in plain)
    assert any("bf16" in t for t in plain)
    huge = advisor(make_llama(), object())(inputs, "Tried to allocate 900.00 GiB")
    assert len(huge) == 3
    assert "frees about" in huge[0]


def test_guard_costs_little(llama) -> None:
    """The snapshot of the random state is all that a micro-batch pays."""
    assert share_of_a_step(rng_snapshot) < 0.1
