"""Token dropping: what is kept, what the blocks see, what the table learns, and what it costs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForMaskedLM, BertConfig, BertForMaskedLM, DistilBertConfig, ModernBertConfig

import tiny
from methods import loops
from thrifty import InputError, NotApplicable, Recipe
from thrifty.methods.selection._tokens import ShortBlocks, gather_mask, gather_rows, keep_best, scatter_rows
from thrifty.methods.selection.token_dropping import TokenImportance, short_stretch

SMALL = {"vocab_size": 97, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4}
ENCODERS = {
    "bert": BertConfig(**SMALL, max_position_embeddings=64),
    "distilbert": DistilBertConfig(vocab_size=97, dim=16, hidden_dim=32, n_layers=4, n_heads=4),
    "modernbert": ModernBertConfig(
        **SMALL, pad_token_id=0, cls_token_id=1, sep_token_id=2, bos_token_id=1, eos_token_id=2, local_attention=4
    ),
}


def batch(count: int = 4) -> dict[str, torch.Tensor]:
    inputs = tiny.collate_text(tiny.text_samples()[:count])
    del inputs["sample_id"]
    return inputs


def build(family: str, attention: str = "sdpa") -> Any:
    torch.manual_seed(0)
    return AutoModelForMaskedLM.from_config(ENCODERS[family], attn_implementation=attention).train(False)


def test_gather_and_scatter_are_inverse():
    hidden = torch.randn(2, 7, 3)
    index = torch.tensor([[0, 2, 6], [1, 3, 4]])
    rows = gather_rows(hidden, index)
    assert torch.equal(rows[1, 2], hidden[1, 4])
    assert torch.equal(scatter_rows(hidden, index, rows), hidden)
    changed = scatter_rows(hidden, index, rows + 1)
    assert torch.equal((changed != hidden).any(-1).nonzero()[:, 1].reshape(2, 3), index)


def test_masks_are_gathered_over_queries_and_keys():
    index = torch.tensor([[0, 2], [1, 2]])
    mask = torch.arange(18).reshape(2, 1, 3, 3)
    assert gather_mask(mask, index)[:, 0].tolist() == [[[0, 2], [6, 8]], [[13, 14], [16, 17]]]
    assert gather_mask(mask[:, :, :1], index)[:, 0].tolist() == [[[0, 2]], [[10, 11]]]
    assert gather_mask(mask[:, 0, 0], index).tolist() == [[0, 2], [10, 11]]


def test_the_largest_are_kept_in_order_and_ties_by_position():
    scores = torch.tensor([[1.0, 5.0, 1.0, 7.0, 1.0], [2.0, 2.0, 2.0, 2.0, 2.0]])
    assert keep_best(scores, 3).tolist() == [[0, 1, 3], [0, 1, 2]]


def test_special_tokens_stay_and_padding_goes():
    importance = TokenImportance(10, always=[2, 3])
    importance.table[:] = torch.arange(10.0)
    ids = torch.tensor([[2, 9, 4, 5, 3, 0, 0, 0], [2, 4, 6, 8, 9, 7, 5, 3]])
    mask = (ids != 0).long()
    assert importance.keep(ids, mask, 4).tolist() == [[0, 1, 3, 4], [0, 3, 4, 7]]
    assert importance.keep(ids, mask, 6)[0].tolist() == [0, 1, 2, 3, 4, 5], "padding only where nothing else is left"


def test_the_table_is_a_running_mean_loss():
    importance = TokenImportance(5, beta=0.9, initial=10.0)
    importance.add(torch.tensor([1.0, 3.0]), torch.tensor([2, 2]))
    importance.add(torch.tensor([4.0]), torch.tensor([4]))
    importance.close_step()
    torch.testing.assert_close(
        importance.table, torch.tensor([10.0, 10.0, 0.9 * 10 + 0.1 * 2, 10.0, 0.9 * 10 + 0.1 * 4])
    )
    importance.close_step()
    assert importance.table[2].item() == pytest.approx(9.2)
    assert importance.table.dtype == torch.float32


@pytest.mark.parametrize("family", ENCODERS)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_keeping_all_is_the_model_itself(family, attention):
    model, inputs = build(family, attention), batch()
    expected = model(**inputs).logits
    blocks = ShortBlocks(model, short_stretch, "test")
    everything = torch.arange(inputs["input_ids"].shape[1]).expand(4, -1)
    with blocks.keeping(everything):
        assert torch.equal(model(**inputs).logits, expected)
    blocks.remove()
    assert not any(m._forward_pre_hooks for m in model.modules())


@pytest.mark.parametrize("family", ENCODERS)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_what_each_block_sees(family, attention):
    """Against blocks called by hand: short in the middle, whole at both ends, the dropped rows as they were."""
    model, inputs = build(family, attention), batch(2)
    blocks_of = next(m for m in model.modules() if isinstance(m, torch.nn.ModuleList) and len(m) == 4)
    seen: list[torch.Tensor] = []
    results: list[torch.Tensor] = []
    masks: list[Any] = []

    def note(module: Any, args: Any, kwargs: Any, out: Any) -> None:
        seen.append(args[0] if args else kwargs["hidden_states"])
        results.append(out[0] if isinstance(out, tuple) else out)
        masks.append(args[1] if len(args) > 1 else kwargs.get("attention_mask"))

    for block in blocks_of:
        block.register_forward_hook(note, with_kwargs=True)
    blocks = ShortBlocks(model, short_stretch, "test")
    index = torch.tensor([[0, 2, 3, 5], [0, 1, 4, 5]])
    with blocks.keeping(index):
        model(**inputs)
    length = inputs["input_ids"].shape[1]
    assert [h.shape[1] for h in seen] == [length, 4, 4, length]
    dropped = [[i for i in range(length) if i not in row] for row in index.tolist()]
    for row in range(2):
        assert torch.equal(seen[3][row, dropped[row]], results[0][row, dropped[row]]), "as they were at the drop point"
        assert torch.equal(seen[3][row, index[row]], results[2][row])
        assert torch.equal(seen[1][row], results[0][row, index[row]])
    if masks[0] is not None:
        assert masks[1].shape[-1] == 4


def test_dropped_tokens_do_not_influence_the_kept_ones_in_the_middle():
    """BERT with other words at dropped positions gives the same middle blocks from the same first states."""
    model = build("bert")
    layers = model.bert.encoder.layer
    blocks = ShortBlocks(model, short_stretch, "test")
    index = torch.tensor([[0, 2, 3, 5]])
    hidden = torch.randn(1, 8, 16)
    outs = []
    for noise in (0.0, 5.0):
        other = hidden.clone()
        other[0, [1, 4, 6, 7]] += noise
        with blocks.keeping(index):
            outs.append(layers[2](layers[1](other)))
    assert torch.equal(outs[0], outs[1])
    assert outs[0].shape[1] == 4


@pytest.mark.parametrize("layers", [2, 4, 12])
def test_stretch_of_the_paper(layers):
    first, last = short_stretch(layers)
    assert first == layers // 2 - 1
    assert last == layers - 1


def test_flops_of_the_middle_blocks_halve():
    config = BertConfig(**{**SMALL, "hidden_size": 32}, max_position_embeddings=64)
    model = BertForMaskedLM(config)
    blocks = ShortBlocks(model, short_stretch, "test")
    ids, flops = torch.randint(3, 97, (2, 64)), []
    for index in (None, torch.arange(32).expand(2, -1)):
        with blocks.keeping(index), FlopCounterMode(display=False) as counter:
            model(input_ids=ids, labels=ids).loss.backward()
        flops.append([sum(counter.flop_counts[f"BertForMaskedLM.bert.encoder.layer.{i}"].values()) for i in range(4)])
    ratios = [short / whole for whole, short in zip(*flops, strict=True)]
    assert (ratios[0], ratios[3]) == (1, 1)
    assert all(0.25 < ratio <= 0.5 for ratio in ratios[1:3])


def test_keep_ratio_one_is_plain_training_to_the_bit(tmp_path):
    runs = []
    for methods in ([], [{"token-dropping": {"keep_ratio": 1.0}}]):
        run = tiny.trainer(tmp_path / str(len(methods)), methods, tiny.bert(dropout=0.1), max_steps=3)
        run.train()
        runs.append(run)
    assert tiny.losses(runs[0]) == tiny.losses(runs[1])
    tiny.assert_same(tiny.weights(runs[0].model), tiny.weights(runs[1].model))


def test_a_run_learns_the_table_and_resumes(tmp_path):
    run = loops.resumes(tmp_path, [{"token-dropping": {"beta": 0.5}}], lambda: tiny.bert(4, dropout=0.1), max_steps=4)
    table = run.recipe["token-dropping"].importance.table
    assert (table != 10).sum() > 10
    assert (table[:3] == 10).all(), "tokens that are never predicted"
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in run.model.modules())


def test_the_table_holds_the_losses_of_the_run(tmp_path):
    """One step without dropping: the model's own loss at each label."""
    model: Any = tiny.bert(4)
    first = batch(2)
    with torch.no_grad():
        losses = functional.cross_entropy(
            model(**first).logits.flatten(0, 1), first["labels"].flatten(), reduction="none"
        )
    run = tiny.trainer(
        tmp_path, [{"token-dropping": {"keep_ratio": 1.0, "beta": 0.0}}], model, samples=tiny.text_samples()[:2],
        max_steps=1,
    )  # fmt: skip
    run.train()
    table = run.recipe["token-dropping"].importance.table
    labels = first["labels"].flatten()
    for token in set(labels[labels >= 0].tolist()):
        assert table[token].item() == pytest.approx(losses[labels == token].mean().item(), rel=1e-4)


def test_works_under_gradient_checkpointing(tmp_path):
    losses = []
    for methods in (["token-dropping"], ["token-dropping", "gradient-checkpointing"]):
        run = tiny.trainer(tmp_path / str(len(methods)), methods, tiny.bert(4, dropout=0.1), max_steps=3)
        run.train()
        losses.append(tiny.losses(run))
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_own_loops_agree():
    def make() -> loops.Setup:
        model = tiny.bert(4)
        blocks = ShortBlocks(model, short_stretch, "mine")
        index = torch.arange(3).expand(2, -1)
        return loops.Setup(model, torch.optim.AdamW(model.parameters(), lr=1e-2), context=lambda: blocks.keeping(index))

    _, losses = loops.both_loops(make)
    assert losses != loops.baseline(lambda: tiny.bert(4))[1]


def test_refusals(tmp_path):
    with pytest.raises(NotApplicable, match="T5ForConditionalGeneration does seq2seq-lm"):
        tiny.trainer(tmp_path, ["token-dropping"], tiny.t5())
    with pytest.raises(NotApplicable, match="none lies between"):
        tiny.trainer(tmp_path, ["token-dropping"], tiny.bert(1))
    for setting in ({"keep_ratio": 0.0}, {"beta": 1.0}):
        with pytest.raises(InputError, match=next(iter(setting))):
            Recipe.parse([{"token-dropping": setting}])
