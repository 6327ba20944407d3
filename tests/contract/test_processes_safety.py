"""Faults and changes with two real gloo processes: memory that runs out on one of them, another process count."""

from __future__ import annotations

import pytest
import torch

import tiny
from thrifty.errors import InputError
from thrifty.safety.store import CheckpointStore

SETTINGS = {"max_steps": 4, "per_device_train_batch_size": 4, "optim": "sgd", "learning_rate": 0.05}


@pytest.fixture(scope="module")
def whole(tmp_path_factory, pair):
    """The weights of two processes where nothing happens, by accumulation."""
    found = {}
    for accumulation in (1, 2):
        folder = tmp_path_factory.mktemp("whole")
        arguments = {**SETTINGS, "gradient_accumulation_steps": accumulation}
        answer = pair.run(methods=[], folder=str(folder), arguments=arguments, out=str(folder / "w"))
        found[accumulation] = (torch.load(folder / "w", weights_only=True), answer["losses"])
    return found


@pytest.mark.parametrize(
    ("part", "accumulation", "occurrence"),
    [
        ("forward", 1, 1),  # before anything is exchanged: the other process waits for the gradients
        ("in-forward", 1, 1),  # after the buffers were exchanged
        ("in-forward", 2, 1),
        ("backward", 2, 1),  # a micro-batch whose gradients stay at home
        ("after-backward", 2, 1),
        ("forward", 2, 2),
    ],
)
@pytest.mark.parametrize("rank", [0, 1])
def test_out_of_memory_on_one_process_keeps_them_agreed(tmp_path, pair, whole, part, accumulation, occurrence, rank):
    # The second step of a pass has one micro-batch where two are accumulated, so it is the third that is struck.
    fault = {"rank": rank, "step": 3, "occurrence": occurrence, "part": part}
    arguments = {**SETTINGS, "gradient_accumulation_steps": accumulation}
    answer = pair.run(
        methods=[], folder=str(tmp_path), arguments=arguments, out=str(tmp_path / "w"), exhaust=fault
    )  # `run` asserts that the two hold the same weights
    assert f"[process {rank}] out of memory in training with 4 x" in answer["told"][rank]
    assert "out of memory" not in answer["told"][1 - rank]
    weights, losses = whole[accumulation]
    tiny.assert_same(torch.load(tmp_path / "w", weights_only=True), weights, atol=2e-6)
    assert answer["losses"] == pytest.approx(losses, abs=1e-5)


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1)])
@pytest.mark.parametrize("step", [2, 8])  # of 6 a pass: also in the second
def test_another_process_count_goes_on_after_the_same_samples(tmp_path, pair, before, after, step):
    """Four samples a step all the time: 1 x 4 and 2 x 2."""
    settings = {"max_steps": 9, "optim": "sgd", "learning_rate": 0.05, "save_strategy": "steps", "save_steps": 1}

    def train(folder, count, resume=None):
        arguments = {**settings, "per_device_train_batch_size": 4 // count}
        if count == 2:
            answer = pair.run(
                methods=[], folder=str(folder), arguments=arguments, out=str(tmp_path / "w"), resume=resume
            )
            samples = [sorted(first + second) for first, second in answer["seen"]]
            return samples, answer["losses"], torch.load(tmp_path / "w", weights_only=True)
        run, samples = tiny.trainer(folder, (), **arguments), []
        original = run.get_batch_samples

        def get_batch_samples(*args):
            batches, items = original(*args)
            samples.append(sorted(int(i) for batch in batches for i in batch["sample_id"]))
            return batches, items

        run.get_batch_samples = get_batch_samples
        run.train(resume_from_checkpoint=resume)
        return samples, tiny.losses(run), tiny.weights(run.model)

    first = train(tmp_path / "before", before)
    checkpoint = tmp_path / "before" / f"checkpoint-{step}"
    assert CheckpointStore(tmp_path / "before", read_only=True).verify(checkpoint) == []
    second = train(tmp_path / "after", after, resume=str(checkpoint))
    assert second[0] == first[0][step:]
    assert second[1] == pytest.approx(first[1], abs=1e-5)
    tiny.assert_same(second[2], first[2], atol=2e-6)


def test_an_iterable_set_goes_on_on_both_processes(tmp_path, pair):
    """Each process reads the stream and takes its share (12 samples, 2 x 2 a step: 3 steps a pass)."""
    settings = {"max_steps": 8, "accelerator_config": {"dispatch_batches": False}}
    job = {"methods": [], "stream": 12, "out": str(tmp_path / "w")}
    saving = {**settings, "save_strategy": "steps", "save_steps": 1}
    full = pair.run(**job, folder=str(tmp_path / "full"), arguments=saving)
    expected = torch.load(tmp_path / "w", weights_only=True)
    for step in (2, 3, 5):
        again = pair.run(
            **job,
            folder=str(tmp_path / "again"),
            arguments=settings,
            resume=str(tmp_path / "full" / f"checkpoint-{step}"),
        )
        steps = [pieces for pieces in again["seen"] if pieces != [[], []]]
        assert steps == [pieces for pieces in full["seen"] if pieces != [[], []]][step:]
        assert again["losses"] == full["losses"]
        tiny.assert_same(torch.load(tmp_path / "w", weights_only=True), expected)


def test_an_exchange_that_had_begun_is_an_error_that_says_what_to_do(tmp_path):
    """In this process alone, as the processor of such a pair would have to be killed: two are claimed, one is there."""
    from thrifty.safety.oom import MicroBatcher

    model = tiny.llama()
    batcher = MicroBatcher(
        model,
        cannot_recover=lambda: "the exchange of gradients with the other processes had begun",
        advise=lambda inputs, message: ["bf16=True (frees about 1.0 GiB)"],
    )
    batch = tiny.collate_text(tiny.text_samples()[:4])
    batch.pop("sample_id")

    def step(piece, share):
        raise torch.OutOfMemoryError("injected")

    with pytest.raises(InputError, match=r"exchange of gradients .* had begun.*Fix: \(1\) bf16"):
        batcher.run(batch, step)
