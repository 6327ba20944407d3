"""Tasks are found by name and by the class of a model."""

from __future__ import annotations

import pytest
import torch
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    BertModel,
    GPT2Config,
    GPT2ForSequenceClassification,
    GPT2LMHeadModel,
    ViTConfig,
    ViTForImageClassification,
)

from thrifty import tasks
from thrifty.errors import InputError

BERT = BertConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8, vocab_size=20)
GPT2 = GPT2Config(n_embd=8, n_layer=1, n_head=1, vocab_size=20)
VIT = ViTConfig(
    hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8, image_size=8, patch_size=4
)


@pytest.mark.parametrize(
    ("cls", "config", "name"),
    [
        (GPT2LMHeadModel, GPT2, "causal-lm"),
        (BertForMaskedLM, BERT, "masked-lm"),
        (BertForSequenceClassification, BERT, "text-classification"),
        (GPT2ForSequenceClassification, GPT2, "text-classification"),
        (ViTForImageClassification, VIT, "image-classification"),
    ],
)
def test_a_model_tells_its_task(cls, config, name):
    class Derived(cls):
        pass

    assert tasks.infer(cls(config)).name == name == tasks.get(name).name
    assert tasks.infer(Derived(config)).name == name


def test_a_peft_model_has_the_task_of_the_model_inside():
    import peft

    model = peft.get_peft_model(
        GPT2LMHeadModel(GPT2), peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["c_attn"])
    )
    assert tasks.infer(model).name == "causal-lm"


def test_unknown_names_and_classes_are_answered():
    with pytest.raises(InputError, match=r"task='causal_lm': unknown task \(did you mean 'causal-lm'\?\)"):
        tasks.get("causal_lm")
    with pytest.raises(InputError, match="no task is known for the class BertModel"):
        tasks.infer(BertModel(BERT))
    with pytest.raises(InputError, match="no task is known for the class Linear"):
        tasks.infer(torch.nn.Linear(2, 2))
    assert {"causal-lm", "masked-lm", "seq2seq-lm", "masked-image-modeling", "image-text"} < set(tasks.names())
