"""Mixtures of experts: routing, losses, conversion, and that results train, resume and load."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

import tiny
from methods import adapters, loops
from thrifty import InputError, NotApplicable, Recipe
from thrifty.methods.moe._convert import describe, moe_layers, to_experts
from thrifty.methods.moe._layer import MoeFeedForward
from thrifty.methods.moe._mixtral import to_mixtral
from thrifty.methods.moe._routing import Route, balance_loss, z_loss
from thrifty.methods.moe.moe_distill import distillation_loss, mean_student

SETTINGS: dict[str, Any] = {
    "width": 6,
    "inner": 10,
    "gated": False,
    "bias": True,
    "act": "gelu",
    "k": 2,
    "renormalise": True,
    "capacity": None,
    "eval_capacity": None,
    "jitter": 0.0,
    "random_second": False,
    "residual": False,
}


def _layer(experts: int, **changes: Any) -> Any:
    torch.manual_seed(0)
    layer = MoeFeedForward({**SETTINGS, **changes}, experts)
    for p in layer.parameters():
        nn.init.normal_(p, std=0.5)
    return layer.train()


def _route(logits: torch.Tensor, k: int = 1, valid: torch.Tensor | None = None) -> Route:
    probabilities = logits.softmax(-1)
    chosen = probabilities.topk(k, dim=-1).indices
    kept = torch.ones_like(chosen, dtype=torch.bool)
    return Route(valid, logits, probabilities, chosen, kept, kept)


# --- the layer ---


@pytest.mark.parametrize("gated", [False, True])
def test_one_expert_is_the_dense_layer(gated):
    layer = _layer(1, k=1, renormalise=False, gated=gated)
    x = torch.randn(2, 5, 6)
    torch.testing.assert_close(layer(x), layer.expert(x, 0))


@pytest.mark.parametrize(("k", "renormalise"), [(1, False), (2, True)])
@pytest.mark.parametrize("capacity", [None, 100.0])
def test_dispatch_equals_a_loop_over_tokens(k, renormalise, capacity):
    layer = _layer(4, k=k, renormalise=renormalise, capacity=capacity)
    x = torch.randn(3, 7, 6, requires_grad=True)
    out = layer(x)
    expected = torch.zeros_like(x).detach()
    for b, t in torch.cartesian_prod(torch.arange(3), torch.arange(7)).tolist():
        probabilities = layer.router(x[b, t]).softmax(-1)
        weights, chosen = probabilities.topk(k)
        weights = weights / weights.sum() if renormalise else weights
        expected[b, t] = sum(w * layer.expert(x[b, t], int(e)) for w, e in zip(weights, chosen, strict=True)).detach()
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
    out.sum().backward()
    assert layer.router.weight.grad.any()


def test_capacity():
    """T 1024, 8 experts, factor 1.25: 160 places. Only the order of the tokens decides who is dropped."""
    layer = _layer(8, k=1, renormalise=False, capacity=1.25)
    collapsed = torch.zeros(1024, 1, dtype=torch.int64)
    wanted = torch.ones(1024, 1, dtype=torch.bool)
    kept = layer.has_room(collapsed, wanted, 1.25)
    assert int(kept.sum()) == 160 == math.ceil(1024 / 8 * 1.25)
    assert bool(kept[:160].all())
    # Second choices come after all first ones, and what is not wanted takes no place.
    chosen = torch.tensor([[0, 1], [1, 0], [0, 1], [1, 0]])
    two = _layer(2, capacity=0.75)
    everything = torch.ones(4, 2, dtype=torch.bool)
    assert two.has_room(chosen, everything, 0.75).tolist() == [[True, True], [True, True], [True, False], [True, False]]
    some = everything.clone()
    some[0] = False
    assert two.has_room(chosen, some, 0.75).tolist()[2] == [True, True]


def test_dropped_tokens_skip_the_layer_and_no_place_is_used_twice():
    layer = _layer(3, k=2, capacity=0.5)
    x = torch.randn(12, 6)
    _, _, chosen, _, wanted, kept = layer.route(x, None)
    places = math.ceil(2 * 12 / 3 * 0.5)
    for expert in range(3):
        assert int(((chosen == expert) & kept).sum()) <= places
    assert bool((wanted & ~kept).any())
    out = layer(x)
    nothing = ~kept.any(dim=1)
    assert not out[nothing].any()
    layer.eval()
    assert bool(layer.route(x, None)[-1].all())
    # Another order of the tokens drops others, but changes nothing for those that are kept in both.
    layer.train()
    order = torch.randperm(12, generator=torch.Generator().manual_seed(1))
    other_kept = torch.empty_like(kept)
    other_kept[order] = layer.route(x[order], None)[-1]
    other = torch.empty_like(out)
    other[order] = layer(x[order])
    both = (kept == other_kept).all(1)
    torch.testing.assert_close(out[both], other[both], rtol=1e-5, atol=1e-6)


def test_the_second_expert_is_taken_at_random():
    layer = _layer(4, random_second=True)
    x = torch.randn(1, 6).expand(4000, 6)
    torch.manual_seed(0)
    _, _, _, weights, wanted, _ = layer.route(x, None)
    assert bool(wanted[:, 0].all())
    assert float(wanted[:, 1].float().mean()) == pytest.approx(min(1.0, 2 * float(weights[0, 1])), abs=0.03)
    layer.eval()
    assert bool(layer.route(x, None)[4].all())


def test_jitter_is_noise_on_the_router_only_while_training():
    layer = _layer(4, k=1, renormalise=False, jitter=0.1)
    x = torch.randn(8, 6)
    first, second = layer.route(x, None)[0], layer.route(x, None)[0]
    assert not torch.equal(first, second)
    layer.eval()
    torch.testing.assert_close(layer.route(x, None)[0], layer.router(x))


def test_the_residual_form():
    """Coefficients of plus and minus infinity select a branch; zero ones take equal halves."""
    layer = _layer(2, k=1, renormalise=False, residual=True)
    x = torch.randn(5, 6)
    shared = layer.feed_forward(x, layer.shared_in, layer.shared_b_in, layer.shared_out, layer.shared_b_out)
    layer.s = {**layer.s, "residual": False}
    routed = layer(x)
    layer.s = {**layer.s, "residual": True}
    nn.init.zeros_(layer.coefficient.weight)
    for bias, expected in (([50.0, -50.0], routed), ([-50.0, 50.0], shared), ([0.0, 0.0], (routed + shared) / 2)):
        layer.coefficient.bias.data.copy_(torch.tensor(bias))
        torch.testing.assert_close(layer(x), expected, rtol=1e-5, atol=1e-6)


# --- the losses ---


def test_balance_loss():
    balanced = _route(torch.eye(8).repeat(4, 1) * 1e-3)
    assert float(balance_loss(balanced)) == pytest.approx(1.0, abs=1e-3)
    collapsed = torch.zeros(32, 8)
    collapsed[:, 3] = 50.0
    assert float(balance_loss(_route(collapsed))) == pytest.approx(8.0, abs=1e-4)
    # transformers counts all k choices: k times ours where top-1 and top-2 are spread alike.
    logits = torch.eye(8).repeat(4, 1) * 1e-3 + torch.eye(8).roll(1, 1).repeat(4, 1) * 5e-4
    theirs = load_balancing_loss_func((logits,), 8, 2)
    assert float(theirs) == pytest.approx(2 * float(balance_loss(_route(logits, 2))), abs=1e-3)  # type: ignore[arg-type]


def test_only_the_probabilities_carry_the_gradient():
    logits = torch.randn(16, 4, generator=torch.Generator().manual_seed(0)).requires_grad_()
    route = _route(logits)
    balance_loss(route).backward()
    share = nn.functional.one_hot(route.chosen[:, 0], 4).float().mean(0)
    again = logits.detach().clone().requires_grad_()
    (4 * (share * again.softmax(-1).mean(0)).sum()).backward()
    torch.testing.assert_close(logits.grad, again.grad)


def test_padding_takes_no_part_in_the_losses():
    logits = torch.randn(10, 4, generator=torch.Generator().manual_seed(0))
    valid = torch.arange(10) < 6
    for loss in (balance_loss, z_loss):
        torch.testing.assert_close(loss(_route(logits, 1, valid)), loss(_route(logits[:6])))
    torch.testing.assert_close(z_loss(_route(logits)), logits.logsumexp(-1).pow(2).mean())


def test_padding_takes_no_place_and_the_losses_see_the_mask(tmp_path):
    run = tiny.trainer(tmp_path, [{"moe-switch": {"experts": 2, "every": 1}}], tiny.llama())
    routing = run.recipe["moe-switch"].routing
    inputs = loops.batch(run.model)
    seen = []

    def compute(model, inputs, num_items):
        loss = model(**inputs).loss
        seen.extend(routing.routes)
        return loss

    run.model.train()
    total = run.recipe["moe-switch"].wrap_loss(compute, run.ctx)(run.model, inputs, None)
    assert len(seen) == 2
    padding = inputs["attention_mask"].flatten() == 0
    assert bool(padding.any())
    for route in seen:
        assert not route.wanted[padding].any()
    plain = run.model(**inputs).loss
    extra = sum(0.01 * balance_loss(route) + 0.001 * z_loss(route) for route in seen)
    assert float(total) == pytest.approx(float(plain + extra), rel=2e-3)
    assert not routing.routes


def test_the_share_of_a_micro_batch(tmp_path):
    """z-losses are sums over tokens, so two micro-batches of unequal lengths add up to the whole batch."""
    results = []
    for size, accumulation in ((1, 4), (4, 1)):
        methods = [{"moe-upcycle": {"experts": 2, "aux_loss": 0.0, "z_loss": 0.5}}]
        run = tiny.trainer(
            tmp_path / str(size),
            methods,
            tiny.llama(),
            samples=[{**s, "input_ids": s["input_ids"][:4], "labels": s["labels"][:4]} for s in tiny.text_samples()],
            max_steps=2,
            optim="sgd",
            learning_rate=0.05,
            per_device_train_batch_size=size,
            gradient_accumulation_steps=accumulation,
        )
        run.train()
        results.append(tiny.weights(run.model))
    tiny.assert_same(*results, atol=1e-6)


# --- conversion ---


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_upcycling_keeps_the_function(tmp_path, family):
    inputs = loops.batch(tiny.FAMILIES[family]())
    expected = adapters.logits(tiny.FAMILIES[family](), inputs)
    run = tiny.trainer(tmp_path, [{"moe-upcycle": {"experts": 4}}], tiny.FAMILIES[family]())
    torch.testing.assert_close(adapters.logits(run.model, inputs), expected, rtol=1e-5, atol=1e-6)
    assert run.recipe["moe-upcycle"].saves_as == ("plain" if family == "llama" else "remote_code")


def test_without_renormalising_upcycling_would_not_keep_it():
    inputs = loops.batch(tiny.llama())
    model = tiny.llama()
    to_experts(
        model,
        describe(model, "test", sparse=[0, 1], experts=[4, 4], k=1, renormalise=False),
        copies=True,
        router_std=0.02,
    )
    assert not torch.allclose(adapters.logits(model, inputs), adapters.logits(tiny.llama(), inputs), atol=1e-3)


def test_number_of_parameters(tmp_path):
    run = tiny.trainer(tmp_path, [{"moe-residual": {"experts": 3, "every": 1}}], tiny.llama(layers=4))
    layers = moe_layers(run.model)
    assert [layer.experts for layer in layers] == [3, 3, 6, 6]
    one = 3 * 16 * 32
    for layer in layers:
        count = sum(p.numel() for p in layer.parameters())
        assert count == one * (layer.experts + 1) + 16 * layer.experts + 2 * 16 + 2
        torch.testing.assert_close(
            layer.shared_out, tiny.llama(layers=4).model.layers[layers.index(layer)].mlp.down_proj.weight
        )  # type: ignore[union-attr, operator]


def test_fresh_experts_differ(tmp_path):
    run = tiny.trainer(tmp_path, [{"moe-switch": {"experts": 3}}], tiny.gpt2())
    (layer,) = moe_layers(run.model)
    assert not torch.equal(layer.w_in[0], layer.w_in[1])
    dense = tiny.gpt2().get_parameter("transformer.h.1.mlp.c_fc.weight")
    assert float(layer.w_in.std()) == pytest.approx(float(dense.std()), rel=0.1)
    assert float(layer.router.weight.std()) == pytest.approx((0.1 / 16) ** 0.5, rel=0.4)


# --- in the trainer ---


@pytest.mark.parametrize(
    ("method", "family"),
    [
        ({"moe-upcycle": {"experts": 2}}, "bert"),
        ({"moe-switch": {"experts": 2}}, "gpt2"),
        ({"moe-top2": {"experts": 3}}, "vit"),
        ({"moe-residual": {"experts": 2, "every": 1}}, "bert"),
    ],
)
def test_trains_resumes_and_loads(tmp_path, method, family):
    run = adapters.trained(tmp_path, method, family, learning_rate=0.01)
    inputs = loops.batch(run.model)
    loaded = adapters.AUTO[family].from_pretrained(tmp_path / "saved", trust_remote_code=True)
    adapters.check_same(loaded, run.model, inputs)
    rows = [row for row in run.state.log_history if "moe_load_max" in row]
    assert len(rows) == 3
    for row in rows:
        assert row["moe_load_max"] >= 1 >= row["moe_load_min"] >= 0
        assert 0 <= row["moe_dropped"] < 1


def test_tokens_are_dropped_and_reported(tmp_path):
    methods = [{"moe-switch": {"experts": 4, "capacity_factor": 0.25, "every": 1}}]
    run = tiny.trainer(tmp_path, methods, tiny.llama(), max_steps=1)
    run.train()
    (row,) = [row for row in run.state.log_history if "moe_dropped" in row]
    assert row["moe_dropped"] > 0.3


@pytest.mark.parametrize("name", ["moe-upcycle", "moe-switch", "moe-top2"])
def test_checkpointing_routes_alike_in_the_recomputation(tmp_path, name):
    results = []
    for index, methods in enumerate(([name], [name, "gradient-checkpointing"])):
        run = tiny.trainer(tmp_path / str(index), methods, tiny.llama(), max_steps=2)
        run.train()
        results.append((tiny.weights(run.model), [r for r in run.state.log_history if "moe_load_max" in r]))
    tiny.assert_same(results[0][0], results[1][0], atol=1e-5)
    strip = [[{k: v for k, v in row.items() if k.startswith("moe")} for row in rows] for _, rows in results]
    assert strip[0] == strip[1]


def test_refusals(tmp_path):
    mixtral = to_mixtral(tiny.llama(), 2)
    for name in ("moe-upcycle", "moe-switch"):
        with pytest.raises(NotApplicable, match=f"{name}: MixtralForCausalLM is a mixture of experts already"):
            tiny.trainer(tmp_path, [name], mixtral)
    with pytest.raises(NotApplicable, match=r"methods\.moe-top2\.every=3.*only 2 layers"):
        tiny.trainer(tmp_path, [{"moe-top2": {"every": 3}}], tiny.llama())
    with pytest.raises(NotApplicable, match=r"mlp_bias=True.*a Mixtral has no biases"):
        tiny.trainer(tmp_path, ["moe-upcycle"], tiny.llama(mlp_bias=True))
    bad = [
        ("moe-upcycle", {"k": 9}),
        ("moe-upcycle", {"experts": 0}),
        ("moe-switch", {"jitter": 1.0}),
        ("moe-switch", {"capacity_factor": 0.0}),
        ("moe-top2", {"experts": 1}),
        ("moe-residual", {"aux_loss": -1.0}),
        ("moe-distill", {"stage": 0.0}),
        ("moe-distill", {"weight": 2.0}),
        ("moe-distill", {"temperature": 0.0}),
    ]
    for name, setting in bad:
        with pytest.raises(InputError, match=next(iter(setting))):
            Recipe.parse([{name: setting}])


# --- distillation ---


def test_distillation_loss():
    student, teacher = torch.randn(2, 3, 5), torch.randn(2, 3, 5)
    assert float(distillation_loss(teacher, teacher, 2.0)) == pytest.approx(0.0, abs=1e-6)
    p, q = (teacher / 2).softmax(-1), (student / 2).softmax(-1)
    rows = 4 * (p * (p.log() - q.log())).sum(-1)
    torch.testing.assert_close(distillation_loss(student, teacher, 2.0), rows.mean())
    valid = torch.tensor([[True, True, False], [True, False, False]])
    torch.testing.assert_close(distillation_loss(student, teacher, 2.0, valid), rows[valid].mean())


@pytest.mark.parametrize("family", ["llama", "gpt2", "bert"])
def test_the_student_of_equal_experts_is_the_dense_model(tmp_path, family):
    """Upcycled, saved, loaded, and averaged back."""
    methods = [{"moe-upcycle": {"experts": 3}}]
    run = tiny.trainer(tmp_path / "run", methods, tiny.FAMILIES[family]())
    run.save_model(str(tmp_path / "saved"))
    auto = adapters.AUTO[family]
    mixture = auto.from_pretrained(tmp_path / "saved", trust_remote_code=True)
    student = mean_student(mixture)
    inputs = loops.batch(student)
    assert type(student) is type(tiny.FAMILIES[family]())
    adapters.check_same(student, tiny.FAMILIES[family](), inputs)


def test_distils_resumes_and_loads(tmp_path):
    def build() -> nn.Module:
        mixtral: Any = to_mixtral(tiny.llama(), 2)
        torch.manual_seed(3)
        for layer in mixtral.model.layers:
            layer.mlp.gate.weight.data.normal_()
            layer.mlp.experts.down_proj.data += 0.3 * torch.randn_like(layer.mlp.experts.down_proj)
        return mixtral

    run = loops.resumes(tmp_path, [{"moe-distill": {"stage": 0.7}}], build, max_steps=4)
    assert type(run.model).__name__ == "LlamaForCausalLM"
    run.save_model(str(tmp_path / "saved"))
    adapters.check_same(AutoModelForCausalLM.from_pretrained(tmp_path / "saved"), run.model, loops.batch(run.model))
    # With all weight on the teacher, the student comes nearer to it than its mean is.
    near = tiny.trainer(
        tmp_path / "near", [{"moe-distill": {"weight": 1.0, "stage": 1.0}}], build(), max_steps=8, learning_rate=1e-3
    )
    start = mean_student(build())
    near.train()
    inputs = loops.batch(start)
    teacher = adapters.logits(build(), inputs)
    before, after = (distillation_loss(adapters.logits(m, inputs), teacher, 1.0) for m in (start, near.model))
    assert float(after) < float(before)


def test_micro_batches_of_a_distillation(tmp_path):
    results = []
    for size, accumulation in ((1, 4), (4, 1)):
        run = tiny.trainer(
            tmp_path / str(size),
            [{"moe-distill": {"stage": 1.0}}],
            to_mixtral(tiny.llama(), 2),
            max_steps=2,
            optim="sgd",
            learning_rate=0.05,
            per_device_train_batch_size=size,
            gradient_accumulation_steps=accumulation,
        )
        run.train()
        results.append(tiny.weights(run.model))
    tiny.assert_same(*results, atol=1e-6)


def test_a_named_teacher(tmp_path):
    to_mixtral(tiny.llama(), 2).save_pretrained(tmp_path / "teacher")
    methods = [{"moe-distill": {"teacher": str(tmp_path / "teacher")}}]
    run = tiny.trainer(tmp_path / "run", methods, tiny.llama(), max_steps=1)
    run.train()
    assert type(run.model.moe_teacher.model).__name__ == "MixtralForCausalLM"
    with pytest.raises(NotApplicable, match="LlamaForCausalLM is no mixture"):
        tiny.trainer(tmp_path, ["moe-distill"], tiny.llama())
    with pytest.raises(InputError, match=r"methods\.moe-distill\.teacher.*no such folder"):
        tiny.trainer(tmp_path, [{"moe-distill": {"teacher": "nowhere"}}], tiny.llama())
