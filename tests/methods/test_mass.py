"""MASS: the span, what each side of the model sees of it, and what that costs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import BartConfig, BartForConditionalGeneration, MarianConfig, MarianMTModel

import tiny
from methods import loops
from thrifty import InputError, NotApplicable, Recipe
from thrifty.methods.selection.mass import SpanCollator, place_positions

MASK = 96


def collator(**settings: Any) -> SpanCollator:
    return SpanCollator(**{"pad_token_id": 0, "mask_token_id": MASK, "vocab_size": 90, **settings})


def texts(lengths: list[int]) -> list[dict[str, Any]]:
    rng = np.random.default_rng(0)
    return [{"input_ids": rng.integers(3, 90, n).tolist(), "sample_id": i} for i, n in enumerate(lengths)]


def bart(layers: int = 2) -> Any:
    torch.manual_seed(0)
    sizes = {"d_model": 16, "encoder_layers": layers, "decoder_layers": layers, "max_position_embeddings": 64}
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32}
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2}
    return BartForConditionalGeneration(BartConfig(vocab_size=97, **sizes, **heads, **tokens, forced_eos_token_id=None))


@pytest.mark.parametrize("ratio", [0.001, 0.3, 0.5, 1.0])
def test_the_span_is_contiguous_and_has_its_length(ratio):
    """The smallest ratio masks one token, as in BERT-like training; 1 masks all, as in a language model."""
    rows = texts([5, 8, 13, 40])
    batch = collator(mask_ratio=ratio)(rows)
    for row, labels, masked in zip(rows, batch["labels"], batch["input_ids"], strict=True):
        ids = row["input_ids"]
        places = (labels != -100).nonzero().flatten().tolist()
        assert len(places) == max(1, round(ratio * len(ids)))
        assert places == list(range(places[0], places[0] + len(places)))
        assert labels[places].tolist() == [ids[i] for i in places]
        outside = [i for i in range(len(ids)) if i not in places]
        assert masked[outside].tolist() == [ids[i] for i in outside]


def test_special_tokens_and_padding_are_no_part_of_the_text():
    rows = [{"input_ids": [1, *range(10, 20), 2]}, {"input_ids": [1, *range(10, 14), 2]}]
    batch = collator(special_token_ids=frozenset({0, 1, 2}), mask_ratio=1.0)(rows)
    assert (batch["labels"] != -100).sum(1).tolist() == [10, 4]
    assert batch["labels"][:, 0].tolist() == [-100, -100]
    assert batch["attention_mask"].sum(1).tolist() == [12, 6]


def test_starts_are_uniform_and_replacements_are_those_of_bert():
    starts, kinds = [], np.zeros(3)
    for epoch in range(400):
        make = collator(epoch=epoch)
        ids = texts([20])[0]["input_ids"]
        batch = make([{"input_ids": ids}])
        places = (batch["labels"][0] != -100).nonzero().flatten()
        starts.append(int(places[0]))
        got = batch["input_ids"][0][places].numpy()
        own = np.array(ids)[places.numpy()]
        kinds += [(got == MASK).sum(), ((got != MASK) & (got != own)).sum(), (got == own).sum()]
    assert set(starts) == set(range(11))
    assert abs(np.mean(starts) - 5) < 0.5
    np.testing.assert_allclose(kinds / kinds.sum(), [0.8, 0.1, 0.1], atol=0.02)


def test_spans_depend_on_seed_epoch_and_text_alone():
    rows = texts([20, 30])
    alone, both = collator()(rows[:1]), collator()(rows)
    assert torch.equal(alone["labels"][0], both["labels"][0][:20])
    other = collator()
    other.set_epoch(1)
    assert not torch.equal(other(rows)["labels"], both["labels"])


def test_the_decoder_gets_the_span_shifted_by_one_at_its_own_positions():
    rows = texts([10, 16])
    batch = collator(decoder_start=7)(rows)
    assert batch["labels"].shape == batch["decoder_input_ids"].shape == (2, 8)
    for row, labels, before, positions in zip(
        rows, batch["labels"], batch["decoder_input_ids"], batch["decoder_positions"], strict=True
    ):
        ids, count = row["input_ids"], len(row["input_ids"]) // 2
        places = positions[:count].tolist()
        assert places == list(range(places[0], places[0] + count))
        assert labels[:count].tolist() == [ids[i] for i in places]
        assert before[:count].tolist() == [7 if i == 0 else ids[i - 1] for i in places]
        assert labels[count:].tolist() == [-100] * (8 - count)


def test_positions_reach_the_decoders_table():
    """The decoder's first block sees token i at position p as if the text before it were there."""
    model = bart().eval()
    seen: list[torch.Tensor] = []
    model.model.decoder.layers[0].register_forward_pre_hook(
        lambda m, args, kwargs: seen.append(args[0] if args else kwargs["hidden_states"]), with_kwargs=True
    )
    ids = torch.randint(3, 90, (1, 12))
    model(input_ids=ids, decoder_input_ids=ids)
    handles = place_positions(model)
    model(input_ids=ids, decoder_input_ids=ids[:, 5:9], decoder_positions=torch.arange(5, 9)[None])
    model(input_ids=ids, decoder_input_ids=ids[:, 5:9])
    whole, span, from_zero = seen
    torch.testing.assert_close(span, whole[:, 5:9])
    assert not torch.allclose(from_zero, span)
    for handle in handles:
        handle.remove()
    assert not model._forward_pre_hooks


def test_the_early_blocks_of_an_encoder_see_no_masked_token(tmp_path):
    model: Any = tiny.bert(4)
    lengths: list[int] = []
    for layer in model.bert.encoder.layer:
        layer.register_forward_hook(lambda m, i, out: lengths.append(out.shape[1]))
    samples = [{"input_ids": list(range(3, 23)), "labels": list(range(3, 23)), "sample_id": i} for i in range(4)]
    run = tiny.trainer(tmp_path, [{"mass": {"mask_token_id": 1}}], model, samples=samples, max_steps=1)
    batch = run.data_collator(samples[:2])
    most = int((batch["input_ids"] != 1).sum(1).max())
    index = run.recipe["mass"]._kept(batch, run.ctx)
    assert index.shape == (2, most)
    lengths.clear()
    run.train()
    whole = lengths[-1]
    assert whole == 20
    assert lengths[-4] == lengths[-3] == lengths[-2] < 16


def test_decoder_flops_halve():
    model = bart()
    handles = place_positions(model)
    ids = torch.randint(3, 90, (2, 32))
    flops = []
    for span in (32, 16):
        positions = torch.arange(span).expand(2, -1) + (32 - span)
        with FlopCounterMode(display=False) as counter:
            model(
                input_ids=ids,
                decoder_input_ids=ids[:, :span],
                labels=ids[:, :span].contiguous(),
                decoder_positions=positions,
            ).loss.backward()
        layers = counter.flop_counts
        own = "BartForConditionalGeneration.model.decoder.layers.1"
        flops.append([sum(layers[f"{own}.{name}"].values()) for name in ("self_attn", "fc1", "fc2")])
    assert all(short / whole <= 0.5 for whole, short in zip(*flops, strict=True))
    for handle in handles:
        handle.remove()


@pytest.mark.parametrize("build", [lambda: tiny.bert(3, dropout=0.1), lambda: tiny.t5(dropout=0.1), bart])
def test_trains_and_resumes(tmp_path, build):
    samples = [{**s, "labels": s["input_ids"]} for s in tiny.text_samples()]
    run = loops.resumes(
        tmp_path, [{"mass": {"mask_token_id": 1}}], build, samples=samples, eval_strategy="steps", eval_steps=2
    )
    assert any("eval_loss" in row for row in run.state.log_history)
    hooks = [m for m in run.model.modules() if m._forward_pre_hooks]
    assert not hooks


def test_own_loops_agree():
    def make() -> loops.Setup:
        from thrifty.methods.selection._tokens import ShortBlocks

        model = tiny.bert(3)
        blocks = ShortBlocks(model, lambda layers: (0, layers - 1), "mine")
        index = torch.tensor([[0, 1, 3]]).expand(2, -1)
        return loops.Setup(model, torch.optim.AdamW(model.parameters(), lr=1e-2), context=lambda: blocks.keeping(index))

    _, losses = loops.both_loops(make)
    assert losses != loops.baseline(lambda: tiny.bert(3))[1]


def test_refusals(tmp_path):
    with pytest.raises(NotApplicable, match=r"mask_token_id.*name its id"):
        tiny.trainer(tmp_path, ["mass"], tiny.bert())
    with pytest.raises(NotApplicable, match="GPT2LMHeadModel does causal-lm"):
        tiny.trainer(tmp_path, [{"mass": {"mask_token_id": 1}}], tiny.gpt2())
    with pytest.raises(NotApplicable, match="none lies between"):
        tiny.trainer(tmp_path, [{"mass": {"mask_token_id": 1, "late_blocks": 2}}], tiny.bert())
    for setting in ({"mask_ratio": 0.0}, {"late_blocks": 0}):
        with pytest.raises(InputError, match=next(iter(setting))):
            Recipe.parse([{"mass": setting}])


def test_sinusoidal_positions_can_be_told_too():
    config = MarianConfig(
        vocab_size=97, d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=16, decoder_ffn_dim=16, pad_token_id=0, decoder_start_token_id=0,
        max_position_embeddings=64, eos_token_id=2, forced_eos_token_id=None,
    )  # fmt: skip
    model = MarianMTModel(config).eval()
    place_positions(model)
    ids = torch.randint(3, 90, (1, 6))
    near = model(input_ids=ids, decoder_input_ids=ids, decoder_positions=torch.arange(6)[None]).logits
    far = model(input_ids=ids, decoder_input_ids=ids, decoder_positions=torch.arange(6)[None] + 9).logits
    torch.testing.assert_close(near, model(input_ids=ids, decoder_input_ids=ids).logits)
    assert not torch.allclose(near, far)
