"""bf16: what it computes in which precision, in a trainer and in one's own loop."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import tiny
from methods import loops
from thrifty.methods.precision.bf16 import bf16_autocast, bf16_supported


def test_resolution_and_range():
    with bf16_autocast("cpu"):
        one = torch.nn.functional.linear(torch.tensor([[1 + 2**-8]]), torch.eye(1))
        sum_of_two = torch.nn.functional.linear(torch.tensor([[256.0, 1.0]]), torch.ones(1, 2))
        large = torch.nn.functional.linear(torch.tensor([[3e38]]), torch.eye(1))
    assert one.dtype == torch.bfloat16
    assert one.item() == 1  # 8 bits of mantissa: 2^-8 is lost
    assert sum_of_two.item() == 256
    assert torch.isfinite(large).all()  # float16 ends at 65,504


def test_products_run_in_bf16_and_the_loss_in_float32():
    model = tiny.llama()
    seen: dict[str, torch.dtype] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            module.register_forward_hook(lambda m, i, o, n=name: seen.update({n: o.dtype}))  # type: ignore[union-attr]
    with bf16_autocast("cpu"):
        loss = model(**loops.batch(model)).loss
    assert set(seen.values()) == {torch.bfloat16}
    assert len(seen) == 2 * 7 + 1
    assert loss.dtype == torch.float32
    loss.backward()
    assert {p.grad.dtype for p in model.parameters() if p.grad is not None} == {torch.float32}


def test_own_loops_agree_and_act():
    def make() -> loops.Setup:
        model = tiny.gpt2()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        return loops.Setup(model, optimizer, context=lambda: bf16_autocast("cpu"))

    setup, losses = loops.both_loops(make)
    _, exact = loops.baseline(tiny.gpt2)
    assert losses != exact
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(exact), rtol=0.02, atol=0)
    assert {p.dtype for p in setup.model.parameters()} == {torch.float32}


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_trains_and_resumes(tmp_path, family):
    """Weights and buffers (rotary frequencies among them) stay in float32."""
    run = loops.resumes(tmp_path, ["bf16"], tiny.FAMILIES[family])
    plain = tiny.trainer(tmp_path / "plain", [], tiny.FAMILIES[family](), max_steps=3)
    plain.train()
    assert tiny.losses(run) != tiny.losses(plain)
    assert tiny.losses(run)[0] == pytest.approx(tiny.losses(plain)[0], rel=1e-2)
    tensors = [*run.model.parameters(), *(b for b in run.model.buffers() if b.is_floating_point())]
    assert {t.dtype for t in tensors} == {torch.float32}
    assert run.accelerator.scaler is None  # a loss scale would be pointless


def test_a_cpu_can_compute_in_it():
    assert bf16_supported(torch.device("cpu"))
    assert not bf16_supported(torch.device("meta"))


@pytest.mark.skipif(torch.accelerator.is_available(), reason="needs a machine without an accelerator")
@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_without_an_accelerator_use_cpu_need_not_be_said(tmp_path, name):
    run = tiny.trainer(tmp_path, [name], use_cpu=False, max_steps=1)
    assert run.args.use_cpu
    run.train()
    assert run.state.global_step == 1
