"""Names the release that moved a private part we stand on, before a run fails in a stranger way."""

from __future__ import annotations

import inspect

import pytest
import torch
import transformers
from accelerate import data_loader
from accelerate.data_loader import DataLoaderShard
from accelerate.optimizer import AcceleratedOptimizer

from thrifty import _hf


@pytest.mark.parametrize("name", _hf.PRIVATE_TRAINER_METHODS)
def test_private_method_of_the_parent(name):
    method = getattr(transformers.Trainer, name, None)
    assert method is not None, f"{_hf.release()} has no Trainer.{name}; thrifty overrides it"
    parameters = inspect.signature(method).parameters
    missing = [p for p in _hf.PRIVATE_TRAINER_METHODS[name] if p not in parameters]
    assert not missing, f"{_hf.release()}: Trainer.{name} lost the parameters {missing}"


def test_parent_still_calls_what_we_override():
    source = inspect.getsource(transformers.Trainer)
    for call in (
        "self._run_epoch(",
        "self.get_batch_samples(",
        "skip_first_batches(train_dataloader",
        "self._load_rng_state(resume_from_checkpoint)",
        "self._maybe_log_save_evaluate(",
        "self.callback_handler.on_epoch_end(",
        "self.create_scheduler(",
        "self.optimizer.step()",
        "self._save_checkpoint(model, trial)",
    ):
        assert call in source, f"{_hf.release()}: transformers.Trainer does not call `{call}...` any more"


def test_accelerate_parts():
    assert "rng_types" in inspect.signature(DataLoaderShard.__init__).parameters, _hf.release()
    assert "scaler" in inspect.signature(AcceleratedOptimizer.__init__).parameters, _hf.release()


def test_checkpointing_argument_has_a_known_name():
    fields = _hf.checkpointing_arguments(True, {"use_reentrant": False})
    args = transformers.TrainingArguments("unused", report_to=[], **fields)
    assert getattr(args, next(iter(fields))) is True


def test_models_still_say_what_stays_in_float32():
    for name in ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict"):
        assert hasattr(transformers.PreTrainedModel, name), f"{_hf.release()}: models have no {name}"
    sizes = {"d_model": 8, "d_ff": 8, "d_kv": 4, "num_layers": 1, "num_heads": 2, "vocab_size": 16}
    model = transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes))
    asked = {name for name, _ in model.named_modules() if _hf.stays_in_fp32(model, name, strict=False)}
    assert asked == {f"{stack}.block.0.layer.{i}.DenseReluDense.wo" for stack, i in (("encoder", 1), ("decoder", 2))}
    model._keep_in_fp32_modules_strict = {"layer.1"}
    assert _hf.stays_in_fp32(model, "encoder.block.0.layer.1.layer_norm.weight", strict=True)
    assert not _hf.stays_in_fp32(model, "encoder.block.0.layer.10.layer_norm.weight", strict=True)


def test_parts_of_ddp_that_a_second_attempt_needs():
    source = inspect.getsource(torch.nn.parallel.DistributedDataParallel)
    for part in ("self.require_forward_param_sync", "self.require_backward_grad_sync", "_check_sync_bufs_pre_fwd"):
        assert part in source, f"{_hf.release()}: DistributedDataParallel has no {part}"


def test_parts_of_the_loaders_that_iterable_data_needs():
    source = inspect.getsource(data_loader)
    for part in (
        "self.base_dataloader",
        "self.end_of_dataloader = True",
        "self.split_batches",
        "IterableDatasetShard(",
    ):
        assert part in source, f"{_hf.release()}: accelerate's loaders have no `{part}`"
