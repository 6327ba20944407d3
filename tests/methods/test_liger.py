"""Liger: it is refused where it cannot run. (Its kernels need a GPU: no numbers are checked here.)"""

from __future__ import annotations

import importlib.util

import pytest
import torch

import tiny
from thrifty import InputError, NotApplicable, Recipe
from thrifty.context import Context
from thrifty.methods.loss import liger
from thrifty.methods.loss.liger import Liger, check_liger


def test_refused_on_a_cpu(monkeypatch):
    monkeypatch.setattr(liger.importlib.util, "find_spec", lambda name: object())
    with pytest.raises(NotApplicable, match="use chunked-cross-entropy"):
        check_liger(torch.device("cpu"))


def test_refused_without_its_package(monkeypatch):
    monkeypatch.setattr(liger.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(NotApplicable, match=r"pip install thrifty\[liger\]"):
        check_liger(torch.device("cuda"))


def test_the_arguments_that_the_trainer_is_given(tmp_path, monkeypatch):
    monkeypatch.setattr(liger.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(Context, "device", torch.device("cuda"))
    arguments = tiny.arguments(tmp_path)
    found = Liger(rope=False).configure(arguments, Context(args=arguments))
    assert found["use_liger_kernel"] is True
    kernels = found["liger_kernel_config"]
    assert kernels == {"fused_linear_cross_entropy": True, "rms_norm": True, "rope": False, "swiglu": True}
    smoothed = tiny.arguments(tmp_path, label_smoothing_factor=0.1)
    with pytest.raises(NotApplicable, match="fused_loss"):
        Liger().configure(smoothed, Context(args=smoothed))


@pytest.mark.skipif(importlib.util.find_spec("liger_kernel") is None, reason="liger-kernel is not installed")
def test_families_that_it_does_not_know_are_refused(tmp_path):
    ctx = Context(args=tiny.arguments(tmp_path))
    with pytest.raises(NotApplicable, match="model_type gpt2"):
        Liger().prepare_model(tiny.gpt2(), ctx)
    model = tiny.llama()
    assert Liger().prepare_model(model, ctx) is model


def test_one_loss_at_a_time():
    with pytest.raises(InputError, match="chunked-cross-entropy"):
        Recipe.parse(["liger", "chunked-cross-entropy"])
