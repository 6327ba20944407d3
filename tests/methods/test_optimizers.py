"""The optimizers against their papers: each formula written out again, or a known limit."""

from __future__ import annotations

import pytest
import torch
import transformers
from torch import nn
from transformers import AutoModelForSeq2SeqLM, BertConfig, BertForSequenceClassification, T5Config

import tiny
from thrifty.hardware.detect import detect
from thrifty.methods.large_batch.ema import MovingAverage
from thrifty.methods.optimizers import muon
from thrifty.methods.optimizers.adamw_anyprecision import AnyPrecisionAdamW
from thrifty.methods.optimizers.lamb import LambOptimizer
from thrifty.methods.optimizers.lars import LarsOptimizer
from thrifty.methods.optimizers.muon import MuonWithAdamW, hidden_matrices, muon_groups, orthogonalise
from thrifty.methods.optimizers.schedule_free import averaged


def network(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 10) -> None:
    rng = torch.Generator().manual_seed(1)
    for _ in range(steps):
        x = torch.randn(16, 6, generator=rng)
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def same(first: nn.Module, second: nn.Module, atol: float) -> None:
    for a, b in zip(first.parameters(), second.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=atol)


# --- AdamW and its groups ---


@pytest.mark.parametrize("implementation", ["fused", "foreach", "loop"])
def test_adamw_implementations_agree(tmp_path, implementation):
    runs = []
    for choice in ("loop", implementation):
        run = tiny.trainer(tmp_path / choice, [{"adamw": {"implementation": choice}}], learning_rate=1e-3)
        run.train()
        runs.append(tiny.weights(run.model))
    tiny.assert_same(*runs, atol=2e-7)


def test_adamw_takes_the_runs_own_numbers(tmp_path):
    run = tiny.trainer(tmp_path, ["adamw"], adam_beta2=0.95, adam_epsilon=1e-6, weight_decay=0.3)
    optimizer = run.create_optimizer()
    assert optimizer.defaults["betas"] == (0.9, 0.95)
    assert optimizer.defaults["eps"] == 1e-6
    assert sorted({group["weight_decay"] for group in optimizer.param_groups}) == [0.0, 0.3]


def test_groups_of_a_bert_classifier(tmp_path):
    config = BertConfig(
        vocab_size=50, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, num_labels=2
    )
    run = tiny.trainer(tmp_path, ["adamw"], BertForSequenceClassification(config))
    groups = run.optimizer_groups(run.model)
    assert [len(group["params"]) for group in groups] == [17, 24]


def test_norms_do_not_decay_and_relative_bias_does(tmp_path):
    llama = tiny.trainer(tmp_path, ["adamw"], tiny.llama(tie_word_embeddings=True))
    decay, spared = (set(group["names"]) for group in llama.optimizer_groups(llama.model))
    assert all("norm" in name for name in spared)
    assert sum("embed_tokens" in name or "lm_head" in name for name in decay) == 1, "a tied weight is one weight"
    config = T5Config(vocab_size=50, d_model=16, d_kv=4, d_ff=32, num_layers=1, num_heads=4, decoder_start_token_id=0)
    t5 = tiny.trainer(tmp_path, ["adamw"], AutoModelForSeq2SeqLM.from_config(config))
    decay, _ = (set(group["names"]) for group in t5.optimizer_groups(t5.model))
    assert any("relative_attention_bias" in name for name in decay), "it is a matrix, although its name says bias"


# --- any precision ---


def test_anyprecision_without_compensation_is_adamw():
    ours, theirs = network(), network()
    train(ours, AnyPrecisionAdamW(ours.parameters(), lr=1e-2, weight_decay=0.1, kahan=False))
    train(theirs, torch.optim.AdamW(theirs.parameters(), lr=1e-2, weight_decay=0.1))
    same(ours, theirs, 1e-6)


@pytest.mark.parametrize(("kahan", "expected"), [(False, 1.0), (True, 1.1)])
def test_compensation_keeps_small_updates(kahan, expected):
    """A bfloat16 weight of 1 moved by 1e-4 a thousand times: plain rounding loses every one of them."""
    p = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    optimizer = AnyPrecisionAdamW([p], lr=1e-4, betas=(0.0, 0.0), eps=0.0, kahan=kahan)
    for _ in range(1000):
        p.grad = -torch.ones_like(p)
        optimizer.step()
    assert p.float().mean().item() == pytest.approx(expected, abs=0.005)


def test_state_types_survive_a_checkpoint():
    p = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    optimizer = AnyPrecisionAdamW([p], lr=1e-2, kahan=True)
    p.grad = torch.full_like(p, 0.3)
    optimizer.step()
    again = AnyPrecisionAdamW([p], lr=1e-2, kahan=True)
    again.load_state_dict(optimizer.state_dict())
    assert again.state[p]["exp_avg"].dtype == torch.float32
    assert torch.equal(again.state[p]["exp_avg"], optimizer.state[p]["exp_avg"])
    assert torch.equal(again.state[p]["compensation"], optimizer.state[p]["compensation"])


# --- Adafactor ---


def test_adafactor_state_is_m_plus_n(tmp_path):
    run = tiny.trainer(tmp_path, ["adafactor"])
    run.train()
    optimizer = run.ctx.optimizer
    for name, p in run.model.named_parameters():
        numbers = sum(v.numel() for k, v in optimizer.state[p].items() if torch.is_tensor(v) and k != "step")
        assert numbers <= (sum(p.shape) if p.ndim == 2 else p.numel()) + 1, name


def test_adafactor_is_that_of_transformers():
    ours, theirs = network(), network()
    train(ours, torch.optim.Adafactor(ours.parameters(), lr=1e-2), 20)
    theirs_optimizer = transformers.Adafactor(
        theirs.parameters(), scale_parameter=True, relative_step=False, warmup_init=False, lr=1e-2
    )
    train(theirs, theirs_optimizer, 20)
    same(ours, theirs, 1e-6)


# --- LAMB and LARS ---


def test_lamb_step_is_a_share_of_the_norm():
    model = network()
    before = [p.detach().clone() for p in model.parameters()]
    train(model, LambOptimizer(model.parameters(), lr=0.01), 1)
    for old, new in zip(before, model.parameters(), strict=True):
        assert (new - old).norm().item() == pytest.approx(0.01 * old.norm().item(), rel=1e-4)


def test_lamb_is_the_papers_formula():
    torch.manual_seed(0)
    p = nn.Parameter(torch.randn(5, 3))
    w, m, v = p.detach().clone().double(), torch.zeros(5, 3).double(), torch.zeros(5, 3).double()
    optimizer = LambOptimizer([p], lr=0.1, weight_decay=0.02)
    for t in range(1, 11):
        gradient = torch.randn(5, 3)
        p.grad = gradient.clone()
        optimizer.step()
        g = gradient.double()
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
        u = (m / (1 - 0.9**t)) / ((v / (1 - 0.999**t)).sqrt() + 1e-6) + 0.02 * w
        w = w - 0.1 * w.norm() / u.norm() * u
    torch.testing.assert_close(p.detach().double(), w, rtol=0, atol=2e-6)


def test_lamb_without_adaptation_is_adamw():
    ours, theirs = network(), network()
    groups = [{"params": list(ours.parameters()), "adapt": False}]
    train(ours, LambOptimizer(groups, lr=1e-2, weight_decay=0.0, eps=1e-6))
    train(theirs, torch.optim.AdamW(theirs.parameters(), lr=1e-2, weight_decay=0.0, eps=1e-6))
    same(ours, theirs, 1e-6)


@pytest.mark.parametrize("cls", [LambOptimizer, LarsOptimizer])
def test_a_tensor_that_starts_at_zero_moves(cls):
    p = nn.Parameter(torch.zeros(3, 3))
    p.grad = torch.ones(3, 3)
    cls([p], lr=0.1).step()
    assert p.abs().min() > 0


def test_lars_is_the_papers_formula():
    torch.manual_seed(0)
    p = nn.Parameter(torch.randn(5, 3))
    w, buffer = p.detach().clone().double(), torch.zeros(5, 3).double()
    optimizer = LarsOptimizer([p], lr=1.0, momentum=0.9, trust=0.01, weight_decay=0.1)
    for _ in range(10):
        gradient = torch.randn(5, 3)
        p.grad = gradient.clone()
        optimizer.step()
        g = gradient.double()
        local = 0.01 * w.norm() / (g.norm() + 0.1 * w.norm())
        buffer = 0.9 * buffer + local * (g + 0.1 * w)
        w = w - buffer
    torch.testing.assert_close(p.detach().double(), w, rtol=0, atol=1e-6)


def test_lars_does_not_see_the_scale_of_the_gradient():
    moved = []
    for scale in (1.0, 100.0):
        torch.manual_seed(0)
        p = nn.Parameter(torch.randn(5, 3))
        p.grad = torch.randn(5, 3) * scale
        LarsOptimizer([p], lr=1.0).step()
        moved.append(p.detach())
    torch.testing.assert_close(*moved, rtol=0, atol=1e-7)


@pytest.mark.parametrize("name", ["lamb", "lars"])
def test_biases_and_norms_are_neither_adapted_nor_decayed(tmp_path, name):
    run = tiny.trainer(tmp_path, [name], tiny.gpt2())
    optimizer = run.create_optimizer()
    plain = [group for group in optimizer.param_groups if not group["adapt"]]
    assert all(p.ndim == 1 for group in plain for p in group["params"])
    assert all(group["weight_decay"] == 0 for group in plain)
    assert all(p.ndim == 2 for group in optimizer.param_groups if group["adapt"] for p in group["params"])


# --- Muon ---


def test_newton_schulz_brings_singular_values_near_one():
    torch.manual_seed(0)
    for shape in ((128, 64), (64, 128), (96, 96)):
        values = torch.linalg.svdvals(orthogonalise(torch.randn(shape)))
        assert values.min() > 0.3
        assert values.max() < 1.21
    values = torch.linalg.svdvals(orthogonalise(torch.randn(128, 64)))
    assert values.min() > 0.67
    assert values.max() < 1.14


def test_newton_schulz_keeps_singular_vectors():
    torch.manual_seed(0)
    u, _, vt = torch.linalg.svd(torch.randn(32, 16), full_matrices=False)
    made = orthogonalise(u @ torch.diag(torch.linspace(0.5, 2, 16)) @ vt)
    inner = u.T @ made @ vt.T
    assert (inner - torch.diag(inner.diag())).abs().max() < 1e-4


def test_muon_is_near_torchs_own():
    """torch's runs its products in bfloat16, ours in float32 on a CPU."""
    torch.manual_seed(0)
    ours, theirs = nn.Parameter(torch.randn(16, 8)), None
    theirs = nn.Parameter(ours.detach().clone())
    first = MuonWithAdamW([{"params": [ours], "muon": True, "lr": 0.02}], weight_decay=0.1)
    second = torch.optim.Muon([theirs], lr=0.02, weight_decay=0.1, momentum=0.95)
    for _ in range(20):
        gradient = torch.randn(16, 8)
        ours.grad, theirs.grad = gradient.clone(), gradient.clone()
        first.step()
        second.step()
    assert (ours - theirs).abs().max() < 2e-2
    assert (ours - theirs).abs().mean() < 2e-3


def test_more_newton_schulz_steps_come_nearer_to_orthogonal():
    torch.manual_seed(0)
    gradient, spread = torch.randn(32, 48), []
    for steps in (1, 3, 5):
        p = torch.nn.Parameter(torch.zeros(32, 48))
        p.grad = gradient.clone()
        MuonWithAdamW([{"params": [p], "muon": True, "lr": 1.0}], ns_steps=steps).step()
        values = torch.linalg.svdvals(p.detach())
        spread.append(float(values.max() / values.min()))
    assert spread[0] > spread[1] > spread[2]
    with pytest.raises(ValueError, match="ns_steps"):
        muon.Muon(ns_steps=0)


def test_muon_trains_hidden_matrices_only():
    model = tiny.llama()
    names = [name for name, _ in model.named_parameters()]
    groups = [{"params": list(model.parameters()), "names": names, "weight_decay": 0.1}]
    muon = [group for group in muon_groups(groups, model, 0.02) if group["muon"]]
    chosen = {id(p) for group in muon for p in group["params"]}
    by_name = dict(model.named_parameters())
    assert id(by_name["model.embed_tokens.weight"]) not in chosen
    assert id(by_name["lm_head.weight"]) not in chosen
    assert id(by_name["model.norm.weight"]) not in chosen
    assert id(by_name["model.layers.1.self_attn.q_proj.weight"]) in chosen
    assert len(chosen) == 2 * 7


def test_muon_splits_fused_matrices_and_knows_what_is_stored_transposed():
    model = tiny.gpt2()
    hidden = hidden_matrices(model)
    assert hidden["transformer.h.0.attn.c_attn.weight"] == ((1, 3), True)
    assert hidden["transformer.h.0.mlp.c_fc.weight"] == (None, True)
    p = model.transformer.h[0].attn.c_attn.weight
    torch.manual_seed(0)
    gradient = torch.randn_like(p)
    before = p.detach().clone()
    p.grad = gradient.clone()
    group = {"params": [p], "muon": True, "lr": 1.0, "parts": [(1, 3)], "transposed": [True], "momentum": 0.0}
    MuonWithAdamW([group]).step()
    expected = torch.cat([orthogonalise(piece) for piece in gradient.chunk(3, dim=1)], dim=1)
    torch.testing.assert_close(before - p.detach(), expected, rtol=0, atol=1e-5)
    up = model.transformer.h[0].mlp.c_fc.weight  # stored (inputs 16, outputs 64): scaled by sqrt(64 / 16)
    before, up.grad = up.detach().clone(), torch.randn_like(up)
    group = {"params": [up], "muon": True, "lr": 1.0, "parts": [None], "transposed": [True], "momentum": 0.0}
    kept = up.grad.clone()
    MuonWithAdamW([group]).step()
    torch.testing.assert_close(before - up.detach(), 2 * orthogonalise(kept), rtol=0, atol=1e-5)


def test_muon_size_matches_adamw_where_asked():
    torch.manual_seed(0)
    p = nn.Parameter(torch.zeros(64, 32))
    p.grad = torch.randn(64, 32)
    MuonWithAdamW([{"params": [p], "muon": True, "lr": 1.0}], scale="match_rms").step()
    assert p.detach().square().mean().sqrt().item() == pytest.approx(0.2, rel=0.15)


def test_muon_takes_equal_matrices_together(monkeypatch: pytest.MonkeyPatch):
    """A batch of matrices is orthogonalised as each alone, whatever its size; so is a fused matrix beside others."""
    torch.manual_seed(0)
    matrices = torch.randn(3, 12, 8)
    alone = torch.stack([orthogonalise(matrix) for matrix in matrices])
    torch.testing.assert_close(orthogonalise(matrices), alone, rtol=0, atol=1e-5)
    torch.testing.assert_close(orthogonalise(matrices.mT), alone.mT, rtol=0, atol=1e-5)

    def step(limit: int) -> list[nn.Parameter]:
        monkeypatch.setattr(muon, "BATCHED_NUMBERS", limit)
        parameters = [nn.Parameter(matrix.clone()) for matrix in [*matrices, matrices.flatten(0, 1)]]
        for p in parameters:
            p.grad = p.detach().clone()
        group = {"params": parameters, "muon": True, "parts": [None, None, None, (0, 3)], "transposed": [False] * 4}
        MuonWithAdamW([group], lr=1.0).step()
        return parameters

    together, one_by_one = step(10_000), step(1)
    for a, b in zip(together, one_by_one, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-5)
    scale = (12 / 8) ** 0.5
    torch.testing.assert_close(together[3], matrices.flatten(0, 1) - scale * alone.flatten(0, 1), rtol=0, atol=1e-4)


def test_muons_products_run_in_what_the_device_does_well():
    torch.manual_seed(0)
    p = nn.Parameter(torch.zeros(96, 64))
    gradient = torch.randn(96, 64)
    made = {}
    for products in (None, torch.bfloat16):
        p.grad = gradient.clone()
        p.data.zero_()
        MuonWithAdamW([{"params": [p], "muon": True, "lr": 1.0}], products=products).step()
        made[products] = p.detach().clone()
    assert 1e-4 < (made[None] - made[torch.bfloat16]).abs().max() < 0.1
    cpu = torch.device("cpu")
    assert muon.products_for(torch.Size((16, 64)), cpu) == torch.float32
    assert muon.products_for(torch.Size((16, 64)), torch.device("cuda")) == torch.bfloat16
    expected = torch.bfloat16 if detect(use_cpu=True).bf16 else torch.float32
    assert muon.products_for(torch.Size((128, 64)), cpu) == expected


# --- Schedule-Free ---


def test_schedule_free_is_the_papers_recursion():
    """z takes the steps, x averages z, and gradients are taken between the two."""
    from schedulefree import SGDScheduleFree

    p = nn.Parameter(torch.tensor([3.0]))
    optimizer = SGDScheduleFree([p], lr=0.1, momentum=0.5)
    optimizer.train()
    z = x = 3.0
    for step in range(1, 11):
        y = 0.5 * z + 0.5 * x
        assert p.item() == pytest.approx(y, abs=1e-5)
        p.grad = 2 * p.detach()
        optimizer.step()
        z -= 0.1 * 2 * y
        x += (z - x) / step
    with averaged(optimizer):
        assert p.item() == pytest.approx(x, abs=1e-5)


def test_evaluation_sees_the_average_and_training_does_not_notice(tmp_path):
    settings = {"max_steps": 6, "learning_rate": 0.05}
    without = tiny.trainer(tmp_path / "a", ["schedule-free"], tiny.llama(), **settings)
    without.train()
    with_eval = tiny.trainer(
        tmp_path / "b",
        ["schedule-free"],
        tiny.llama(),
        eval_strategy="steps",
        eval_steps=1,
        save_strategy="steps",
        save_steps=3,
        **settings,
    )
    with_eval.train()
    assert tiny.losses(without) == tiny.losses(with_eval)
    tiny.assert_same(tiny.weights(without.model), tiny.weights(with_eval.model))
    rates = [row["learning_rate"] for row in without.state.log_history if "learning_rate" in row]
    assert rates == [0.05] * 6, "there is no schedule"


def test_average_is_applied_and_taken_back_bit_for_bit():
    from schedulefree import AdamWScheduleFree

    model = network()
    optimizer = AdamWScheduleFree(model.parameters(), lr=0.05)
    optimizer.train()
    train(model, optimizer)
    own = [p.detach().clone() for p in model.parameters()]
    with averaged(optimizer):
        inside = [p.detach().clone() for p in model.parameters()]
    assert any(not torch.equal(a, b) for a, b in zip(own, inside, strict=True))
    assert all(torch.equal(a, b.detach()) for a, b in zip(own, model.parameters(), strict=True))


# --- EMA ---


def test_moving_average_in_closed_form():
    model = nn.Linear(1, 1, bias=False)
    average = MovingAverage(decay=0.9, warm_up=False)
    values = [float(t) for t in range(6)]
    for value in values:
        with torch.no_grad():
            model.weight.fill_(value)
        average.update(model)
    expected = values[0]
    for value in values[1:]:
        expected = 0.9 * expected + 0.1 * value
    assert average.mean["weight"].item() == pytest.approx(expected)
    with average.applied(model):
        assert model.weight.item() == pytest.approx(expected)
    assert model.weight.item() == 5.0
