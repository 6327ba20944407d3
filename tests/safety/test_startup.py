"""Each start-up check finds its real fault on a real tiny model or tokenizer, and is silent where there is none."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import nn
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    DataCollatorForLanguageModeling,
    DataCollatorWithFlattening,
    PreTrainedTokenizerFast,
)

from thrifty.errors import InputError
from thrifty.safety import startup
from thrifty.safety.startup import Finding, settle


def tokenizer(adds_bos: bool = True, pad: str = "<pad>") -> PreTrainedTokenizerFast:
    vocabulary = {"<pad>": 0, "<s>": 1, "</s>": 2, "<unk>": 3, **{f"w{i}": 4 + i for i in range(40)}}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if adds_bos:
        core.post_processor = processors.TemplateProcessing(
            single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token="<s>", eos_token="</s>", pad_token=pad, unk_token="<unk>"
    )


def collated(texts: list[str], pad: str = "<pad>", adds_bos: bool = True) -> tuple[Any, dict[str, torch.Tensor]]:
    tok = tokenizer(adds_bos, pad)
    collator = DataCollatorForLanguageModeling(tok, mlm=False)
    return tok, dict(collator([{k: v for k, v in tok(t).items() if k != "token_type_ids"} for t in texts]))


TEXTS = ["w1 w2 w3", "w4 w5 w6 w7 w8"]


def levels(findings: list[Finding]) -> list[str]:
    return [f.level for f in findings]


def test_share_of_trainable_tokens() -> None:
    _, batch = collated(TEXTS)
    (finding,) = startup.trainable_tokens([batch])
    assert finding.level == "notice"
    assert "83.3 % of the tokens" in finding.text
    batch["labels"][:] = -100
    (finding,) = startup.trainable_tokens([batch])
    assert finding.level == "error"
    assert "every label is -100" in finding.text
    (finding,) = startup.trainable_tokens([collated(TEXTS)[1], batch])
    assert finding.level == "error"
    assert "1 of 2 batches" in finding.text
    only_first = {"labels": torch.tensor([[5, -100, -100]])}
    assert levels(startup.trainable_tokens([only_first])) == ["error"], "the first label of a causal model never counts"
    assert levels(startup.trainable_tokens([only_first], causal=False)) == ["notice"]


def test_end_token_hidden_by_padding_is_found_with_the_real_collator() -> None:
    tok, batch = collated(TEXTS, pad="</s>")
    (finding,) = startup.end_token(tok, [batch])
    assert finding.level == "error"
    assert "samples end in </s>" in finding.text
    fixed = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    assert startup.end_token(tok, [{**batch, "labels": fixed}]) == []
    tok, batch = collated(TEXTS)
    assert startup.end_token(tok, [batch]) == []
    tok, batch = collated(TEXTS, pad="</s>", adds_bos=False)
    assert levels(startup.end_token(tok, [batch])) == ["notice"]


def test_special_tokens_are_not_doubled() -> None:
    tok, batch = collated(TEXTS)
    assert startup.special_tokens(tok, [batch]) == []
    tok, batch = collated(["<s> w1 w2", "w4"])
    assert [f.text for f in startup.special_tokens(tok, [batch])] == ["samples begin with <s> twice"]
    tok, batch = collated(["w1 w2 </s>", "w4"])
    assert [f.text for f in startup.special_tokens(tok, [batch])] == ["samples end with </s> twice"]
    left = {k: v.flip(1) for k, v in collated(["w1 </s>", "w4 w5 w6 w7"])[1].items()}
    assert startup.special_tokens(
        tok, [{"input_ids": left["input_ids"].flip(1), "attention_mask": left["attention_mask"].flip(1)}]
    )


def test_labels_outside_the_range(llama) -> None:
    good = {"input_ids": torch.tensor([[1, 96]]), "labels": torch.tensor([[-100, 96]])}
    assert startup.label_range(llama, [good]) == []
    texts = [
        f.text
        for f in startup.label_range(llama, [{"input_ids": torch.tensor([[97]]), "labels": torch.tensor([[-1]])}])
    ]
    assert texts == ["token id 97 is outside the model's 97 embeddings", "label -1 is outside 0..96"]
    sizes: dict[str, Any] = {
        "hidden_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "intermediate_size": 8,
        "vocab_size": 20,
    }
    config = BertConfig(**sizes)
    config.num_labels = 3
    classifier = BertForSequenceClassification(config)
    batch = {"input_ids": torch.ones(2, 4, dtype=torch.long), "labels": torch.tensor([0, 3])}
    assert [f.text for f in startup.label_range(classifier, [batch])] == ["label 3 is outside 0..2"]
    assert startup.label_range(classifier, [{**batch, "labels": torch.tensor([0.5, 3.0])}]) == []


def test_precision_faults(make_llama) -> None:
    cpu = torch.device("cpu")
    assert startup.precision(make_llama(), fp16=False, bf16=True, device=cpu) == []
    half = startup.precision(make_llama().half(), fp16=True, bf16=False, device=cpu)
    assert levels(half) == ["error", "error"]
    assert "trainable weights are float16" in half[0].text
    frozen = make_llama().half().requires_grad_(False)
    frozen.lm_head.float().requires_grad_(True)
    assert [f.text for f in startup.precision(frozen, fp16=True, bf16=False, device=cpu)] == [
        "fp16=True has no gradient scaler on the CPU"
    ]
    notice = startup.precision(make_llama().bfloat16(), fp16=False, bf16=False, device=cpu)
    assert levels(notice) == ["notice"]
    assert "1/256" in notice[0].text


def test_device_without_bfloat16(llama, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    (finding,) = startup.precision(llama, fp16=False, bf16=True, device=torch.device("cuda"))
    assert finding.level == "error"
    assert "Tesla T4" in finding.text
    assert "fp16=True" in str(finding.fix)


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("inputs_need_grad", [True, False])
def test_reentrant_checkpointing_with_frozen_embeddings(llama, use_reentrant: bool, inputs_need_grad: bool) -> None:
    model = llama
    model.requires_grad_(False)
    for layer in model.model.layers:
        layer.mlp.up_proj.requires_grad_(True)
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": use_reentrant})
    if not inputs_need_grad:  # transformers 5 lets the embeddings' output need a gradient; undone to have the fault
        model.disable_input_require_grads()
    model.train()
    ids = torch.ones(1, 4, dtype=torch.long)
    loss = model(input_ids=ids, labels=ids).loss
    learns = loss.requires_grad
    found = startup.reentrant(model)
    assert (found == []) is learns, "the check agrees with what really happens"
    assert learns is (inputs_need_grad or not use_reentrant)


def test_tied_weights(make_llama) -> None:
    tied = make_llama(tie_word_embeddings=True)
    assert startup.tied_weights(tied) == []
    assert startup.tied_weights(make_llama(tie_word_embeddings=False)) == []
    tied.lm_head.weight = nn.Parameter(tied.lm_head.weight.detach().clone())
    assert "two tensors" in startup.tied_weights(tied)[0].text


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_packing_check_sees_contamination_and_its_absence(make_llama, attention: str) -> None:
    model = make_llama(attn_implementation=attention, use_cache=False)
    documents = [[5, 6, 7, 8], [9, 10, 11], [12, 13, 14, 15, 16]]
    batch: dict[str, Any] = dict(DataCollatorWithFlattening(return_tensors="pt")([{"input_ids": d} for d in documents]))
    model.train()
    assert startup.packing(model, batch) == []
    assert model.training
    leaking = {**batch, "attention_mask": torch.ones_like(batch["input_ids"])}
    (finding,) = startup.packing(model, leaking)
    assert finding.level == "error"
    assert "see one another" in finding.text
    model.config.use_cache = True
    assert levels(startup.packing(model, batch)) == ["error"]


def test_packing_check_leaves_the_random_state(llama) -> None:
    batch = {"input_ids": torch.tensor([[5, 6, 7, 8]]), "position_ids": torch.tensor([[0, 1, 0, 1]])}
    before = torch.get_rng_state()
    startup.packing(llama, batch)
    assert torch.equal(before, torch.get_rng_state())


def test_settle_reports_notices_and_refuses_errors_with_every_text() -> None:
    lines: list[str] = []
    notice = Finding("notice", "labels", "half of the tokens")
    settle([notice], lines.append)
    assert lines == ["half of the tokens"]
    with pytest.raises(InputError, match=r"labels: one; two\. Fix: do this; do that") as caught:
        settle(
            [Finding("error", "labels", "one", "do this"), notice, Finding("error", "bf16", "two", "do that")],
            lines.append,
        )
    assert caught.value.key == "labels"
    assert len(lines) == 2
