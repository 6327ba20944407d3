"""2:4 sparsity: the pattern along the inputs, SR-STE by hand, and the kernels' detour."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import nn
from torch.ao.pruning import WeightNormSparsifier
from transformers import LlamaConfig, LlamaForCausalLM, TrainerCallback
from transformers.pytorch_utils import Conv1D

import tiny
from methods import loops
from thrifty import InputError, NotApplicable, Recipe
from thrifty.methods.sparsity.two_four import TwoFour, has_kernels, layers, sparse_kernels, two_four_mask


def _assert_two_of_four(model: nn.Module) -> None:
    for name, module in layers(model).items():
        weight: Any = module.weight
        by_input = weight.mT if isinstance(module, Conv1D) else weight
        assert ((by_input != 0).reshape(-1, 4).sum(1) == 2).all(), name


def test_the_two_largest_of_four_by_brute_force():
    torch.manual_seed(0)
    weight = torch.randn(6, 12)
    weight[0, :4] = torch.tensor([4.0, 1.0, -3.0, 2.0])
    weight[1, :4] = 1.0  # ties
    mask = two_four_mask(weight)
    assert (weight * mask)[0, :4].tolist() == [4.0, 0.0, -3.0, 0.0]
    for row, group in itertools.product(range(6), range(3)):
        values = weight[row, 4 * group : 4 * group + 4].abs().tolist()
        kept = [v for v, m in zip(values, mask[row, 4 * group : 4 * group + 4].tolist(), strict=True) if m]
        assert sorted(kept) == sorted(values)[2:]
    assert (weight * mask).square().sum() >= weight.square().sum() / 2


def test_equals_the_sparsifier_of_torch():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 8, bias=False))
    weight: Any = model[0].weight.detach().clone()
    sparsifier = WeightNormSparsifier(sparsity_level=1.0, sparse_block_shape=(1, 4), zeros_per_block=2)
    sparsifier.prepare(model, [{"tensor_fqn": "0.weight"}])
    sparsifier.step()
    sparsifier.squash_mask()
    torch.testing.assert_close(weight * two_four_mask(weight), model[0].weight)


@pytest.mark.parametrize(
    ("family", "mode"), [("gpt2", "fixed"), ("gpt2", "sr-ste"), ("bert", "sr-ste"), ("vit", "fixed")]
)
def test_trains_resumes_and_ends_with_the_pattern(tmp_path, family, mode):
    run = loops.resumes(tmp_path, [{"two-four": {"mode": mode}}], tiny.FAMILIES[family])
    _assert_two_of_four(run.model)
    assert run.evaluate()["eval_loss"] > 0


class Watch(TrainerCallback):
    def __init__(self, run: Any) -> None:
        self.run, self.masks = run, []

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        _assert_two_of_four(self.run.model)
        self.masks.append({n: m.clone() for n, m in self.run.recipe["two-four"].weights.masks.items()})


def test_the_pattern_is_fixed_or_moves(tmp_path):
    moved = {}
    for mode in ("fixed", "sr-ste"):
        run = tiny.trainer(tmp_path / mode, [{"two-four": {"mode": mode}}], max_steps=4)
        run.add_callback(watch := Watch(run))
        run.train()
        moved[mode] = any(not torch.equal(a[n], b[n]) for a, b in itertools.pairwise(watch.masks) for n in a)
    assert moved == {"fixed": False, "sr-ste": True}


def test_sr_ste_by_hand(tmp_path):
    """g = dL/dW at the masked weights, plus decay (1 - m) W, applied to the dense weights: three steps of SGD."""
    decay, rate = 0.1, 0.05
    arguments: dict[str, Any] = {"optim": "sgd", "weight_decay": 0.0, "max_grad_norm": 0.0, "learning_rate": rate,
                                 "lr_scheduler_type": "constant", "warmup_steps": 0, "max_steps": 3}  # fmt: skip
    for accumulation in (1, 2):
        run = tiny.trainer(
            tmp_path / str(accumulation),
            [{"two-four": {"mode": "sr-ste", "decay": decay}}],
            per_device_train_batch_size=4 // accumulation,
            gradient_accumulation_steps=accumulation,
            **arguments,
        )
        model: Any = tiny.llama().train()
        dense = {f"{n}.weight": m.weight.detach().clone() for n, m in layers(model).items()}
        batches = []
        original = run.training_step

        def step(m: Any, inputs: Any, *args: Any, original: Any = original, batches: list = batches) -> Any:
            batches.append(({k: v.clone() for k, v in inputs.items() if k != "sample_id"}, *args))
            return original(m, inputs, *args)

        run.training_step = step  # type: ignore[method-assign]
        run.train()
        for index in range(3):
            masks = {name: two_four_mask(w) for name, w in dense.items()}
            with torch.no_grad():
                for name, w in dense.items():
                    model.get_parameter(name).copy_(w * masks[name])
            model.zero_grad()
            for inputs, count in batches[index * accumulation : (index + 1) * accumulation]:
                model(**inputs, num_items_in_batch=count).loss.backward()
            with torch.no_grad():
                for name, p in model.named_parameters():
                    if name in dense:
                        dense[name] -= rate * (p.grad + decay * dense[name] * ~masks[name])
                    else:
                        p.sub_(rate * p.grad)
        for name, w in dense.items():
            torch.testing.assert_close(run.recipe["two-four"].weights.dense[name], w, rtol=1e-4, atol=1e-6)  # type: ignore[attr-defined]
            torch.testing.assert_close(run.model.get_parameter(name), w * two_four_mask(w), rtol=1e-4, atol=1e-6)


def test_sr_ste_decays_by_the_same_amount_under_fp16(tmp_path):
    """The pull must not be swallowed by the gradients' scale."""
    weights = []
    for extra in ([], ["fp16"]):
        run = tiny.trainer(
            tmp_path / str(len(extra)),
            [{"two-four": {"mode": "sr-ste", "decay": 5.0}}, *extra],
            max_steps=1, optim="sgd", learning_rate=0.05, warmup_steps=0, weight_decay=0.0, max_grad_norm=0.0,
        )  # fmt: skip
        run.train()
        weights.append({n: w.clone() for n, w in run.recipe["two-four"].weights.dense.items()})  # type: ignore[attr-defined]
    start = {f"{n}.weight": m.weight.detach() for n, m in layers(tiny.llama()).items()}
    for name, plain in weights[0].items():
        assert (plain - start[name]).abs().max() > 1e-3
        torch.testing.assert_close(weights[1][name], plain, rtol=0, atol=2e-4)


def test_own_loops_agree_and_act():
    def make(dense: bool) -> loops.Setup:
        model = tiny.gpt2()
        sparse = TwoFour(layers(model), dense=dense)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        if not dense:
            return loops.Setup(
                model,
                optimizer,
                after_backward=lambda step: sparse.mask_gradients(),
                after_step=lambda step: sparse.apply(optimizer),
            )

        def after_backward(step: int) -> None:
            sparse.pull(1e-3)
            sparse.bare()

        return loops.Setup(model, optimizer, after_backward=after_backward, after_step=lambda step: sparse.cover())

    for dense in (False, True):
        setup, losses = loops.both_loops(lambda dense=dense: make(dense))
        assert losses != loops.baseline(tiny.gpt2)[1]
        _assert_two_of_four(setup.model)


def test_says_that_a_cpu_has_masks_only(tmp_path, capsys):
    run = tiny.trainer(tmp_path / "auto", ["two-four"], max_steps=1)
    run.train()
    assert "two-four: masks only, since cpu has no sparse kernels" in capsys.readouterr().out
    assert not any(has_kernels(module) for module in layers(run.model).values())
    tiny.trainer(tmp_path / "off", [{"two-four": {"kernels": "off"}}], max_steps=1).train()
    assert "masks only" not in capsys.readouterr().out


def test_the_detour_of_the_kernels_computes_the_same_and_leaves_the_weights(tmp_path):
    """With a stand-in for the compression, which a CPU does not have."""
    model: Any = tiny.llama().bfloat16().eval()
    TwoFour(layers(model))
    inputs = loops.batch(model)
    compressed: list[torch.Size] = []

    def compress(weight: torch.Tensor) -> torch.Tensor:
        compressed.append(weight.shape)
        return weight

    with torch.no_grad():
        expected = model(**inputs).logits
        names = list(model.state_dict())
        with sparse_kernels(layers(model), lambda module: True, compress) as used:
            assert len(used) == 14
            assert compressed == []  # only when something is computed
            assert torch.equal(model(**inputs).logits, expected)
            assert torch.equal(model(**inputs).logits, expected)
            assert list(model.state_dict()) == names
        assert len(compressed) == 14
        assert torch.equal(model(**inputs).logits, expected)
    assert all("forward" not in vars(module) for module in layers(model).values())


def test_layers_whose_inputs_do_not_divide_stay_dense(tmp_path):
    config = LlamaConfig(vocab_size=97, hidden_size=16, intermediate_size=30, num_hidden_layers=1,
                         num_attention_heads=4, num_key_value_heads=4)  # fmt: skip
    model = LlamaForCausalLM(config)
    assert len(layers(model)) == 6  # all but down_proj
    model.requires_grad_(False)
    with pytest.raises(NotApplicable, match="two-four: no linear weight"):
        tiny.trainer(tmp_path, ["two-four"], model)


@pytest.mark.parametrize("setting", [{"mode": "no"}, {"decay": -1.0}, {"kernels": "no"}])
def test_bad_settings(setting):
    with pytest.raises(InputError, match=next(iter(setting))):
        Recipe.parse([{"two-four": setting}])
