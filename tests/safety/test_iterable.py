"""Iterable data sets: a resumed run goes on after the same samples, also in a later pass over the data."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import thrifty
import tiny
from streams import COUNT, Sized, Stateful, Stream
from thrifty.errors import InputError, NotApplicable
from thrifty.safety.iterable import DATA_STATE, why_no_state


def hub(shuffled: bool = False) -> Any:
    import datasets

    columns = {
        key: [sample[key] for sample in tiny.text_samples()[:COUNT]] for key in ("input_ids", "labels", "sample_id")
    }
    streamed = datasets.Dataset.from_dict(columns).to_iterable_dataset(num_shards=3)
    return streamed.shuffle(seed=1, buffer_size=4) if shuffled else streamed


SETS = {
    "stateful": Stateful,
    "sized": Sized,
    "stateless": Stream,
    "datasets": hub,
    "datasets with a shuffle buffer": lambda: hub(shuffled=True),
}


def start(folder: Any, dataset: Any, **settings: Any) -> tuple[Any, list[list[int]]]:
    run = thrifty.Trainer(
        tiny.llama(dropout=0.1),
        tiny.arguments(folder, **settings),
        train_dataset=dataset,
        data_collator=tiny.collate_text,
    )
    seen: list[list[int]] = []
    original = run.get_batch_samples

    def get_batch_samples(*args: Any) -> Any:
        batches, items = original(*args)
        if batches:
            seen.append([int(i) for batch in batches for i in batch["sample_id"]])
        return batches, items

    run.get_batch_samples = get_batch_samples
    return run, seen


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("name", SETS)
def test_resume_is_exact_in_every_pass(tmp_path, name, accumulation, capsys):
    """A pass has 6 batches; the steps are in the first pass, at its end, and in the second and third."""
    steps = 14 // accumulation
    settings = {"max_steps": steps, "gradient_accumulation_steps": accumulation}
    saving = {"save_strategy": "steps", "save_steps": 1}
    full, order = start(tmp_path, SETS[name](), **settings, **saving)
    full.train()
    assert len(order) == steps
    for step in (2, 6, 7, 13) if accumulation == 1 else (1, 3, 4):
        again, rest = start(tmp_path / "again", SETS[name](), **settings)
        capsys.readouterr()
        again.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{step}"))
        told = capsys.readouterr().out
        assert rest == order[step:], f"after step {step}"
        assert tiny.losses(again) == tiny.losses(full), f"after step {step}"
        tiny.assert_same(tiny.weights(again.model), tiny.weights(full.model))
        in_mid_pass = step * accumulation % 6 != 0
        reads = name in ("stateless", "datasets with a shuffle buffer")
        assert ("is read again up to sample" in told) is (reads and in_mid_pass)


def test_the_guarded_run_is_that_of_the_bare_parent(tmp_path):
    results = []
    for guards in (True, False):
        run, order = start(tmp_path / str(guards), Stateful(), max_steps=14)
        if not guards:
            run.guards = thrifty.safety.options.Guards.off()
        run.train()
        results.append((order, tiny.weights(run.model), run.state.epoch))
    assert results[0][0] == results[1][0]
    assert results[0][2] == results[1][2]
    tiny.assert_same(results[0][1], results[1][1])


def test_a_set_with_state_reads_nothing_twice(tmp_path):
    full, _ = start(tmp_path, Stateful(), max_steps=5, save_strategy="steps", save_steps=4)
    full.train()
    dataset = Stateful()
    again, _ = start(tmp_path, dataset, max_steps=5)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert dataset.read == COUNT - 2 * 4


def test_other_micro_batches_of_the_same_step_go_on(tmp_path):
    full, order = start(
        tmp_path, Stateful(), max_steps=5, per_device_train_batch_size=2, save_strategy="steps", save_steps=2
    )
    full.train()
    settings = {"max_steps": 5, "per_device_train_batch_size": 1, "gradient_accumulation_steps": 2}
    again, rest = start(tmp_path / "again", Stateful(), **settings)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert rest == order[2:]
    larger, _ = start(tmp_path / "again", Stateful(), max_steps=5, per_device_train_batch_size=4)
    with pytest.raises(InputError, match="as many samples a step as before: 2, not 4"):
        larger.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    done, _ = start(tmp_path / "again", Stateful(), max_steps=4)
    done.guards.schedule = "continue"
    with pytest.raises(InputError, match="nothing is left to run: step 4 of 4"):
        done.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))


def test_a_checkpoint_of_the_plain_trainer_is_placed_by_its_epoch(tmp_path, capsys):
    full, order = start(tmp_path, Stateful(), max_steps=9, save_strategy="steps", save_steps=8)
    full.guards = thrifty.safety.options.Guards.off()
    full.train()
    assert not (tmp_path / "checkpoint-8" / DATA_STATE.format(rank=0)).exists()
    again, rest = start(tmp_path / "again", Stateful(), max_steps=9)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-8"))
    assert rest == order[8:]
    assert "read again up to sample 4 of pass 2: the checkpoint holds no state" in capsys.readouterr().out


def test_rewind_seeks_too(tmp_path):
    run, order = start(tmp_path, Stateful(), max_steps=9, save_strategy="steps", save_steps=3)
    run.guards.on_non_finite = "rewind"
    original, left = run.compute_loss, [1]

    def compute_loss(model: Any, *args: Any, **kwargs: Any) -> Any:
        loss = original(model, *args, **kwargs)
        if run.state.global_step == 7 and left[0]:
            left[0] = 0
            return loss * float("nan")
        return loss

    run.compute_loss = compute_loss
    run.train()
    assert order[8:10] == order[6:8], "steps 7 and 8 were read again after going back to step 6"
    assert all(torch.isfinite(p).all() for p in run.model.parameters())


def test_what_an_iterable_set_cannot_do_is_refused(tmp_path):
    for method in ("selective-backprop", "packing"):
        with pytest.raises(NotApplicable, match=f"methods.{method}: chooses or arranges samples"):
            thrifty.Trainer(
                tiny.llama(),
                tiny.arguments(tmp_path),
                train_dataset=Stateful(),
                data_collator=tiny.collate_text,
                methods=[method],
            )


def test_why_no_state():
    class Pickled(Stateful):
        def state_dict(self) -> Any:
            return {"file": object()}

    assert why_no_state(Stateful(), workers=0) is None
    assert "no state_dict" in str(why_no_state(Stream(), workers=0))
    assert "dataloader_num_workers=0" in str(why_no_state(Stateful(), workers=2))
    assert "shuffle buffer" in str(why_no_state(hub(shuffled=True), workers=0))
    assert "without pickle" in str(why_no_state(Pickled(), workers=0))
