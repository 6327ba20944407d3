"""Models come from folders and configurations, seeded and in float32; what does not fit is one message."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file

from thrifty import tasks
from thrifty.errors import InputError
from thrifty.tasks import models

LLAMA = {
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
}
CAUSAL = tasks.get("causal-lm")


def test_from_scratch_follows_seed_and_tokenizer(tokenizer):
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    one = CAUSAL.build_model(None, LLAMA, seed=1, processor=tokenizer)
    assert torch.equal(torch.rand(3), expected), "the global random state is left alone"
    two = CAUSAL.build_model(None, LLAMA, seed=1, processor=tokenizer)
    three = CAUSAL.build_model(None, LLAMA, seed=2, processor=tokenizer)
    state = one.state_dict()
    assert all(torch.equal(value, two.state_dict()[name]) for name, value in state.items())
    assert not torch.equal(state["model.embed_tokens.weight"], three.state_dict()["model.embed_tokens.weight"])
    config = one.config
    assert (config.vocab_size, config.pad_token_id, config.eos_token_id, config.bos_token_id) == (512, 1, 0, 0)
    assert one.dtype == torch.float32


def test_a_mapping_goes_before_the_tokenizer(tokenizer):
    model = CAUSAL.build_model(None, {**LLAMA, "vocab_size": 600}, seed=1, processor=tokenizer)
    assert model.state_dict()["model.embed_tokens.weight"].shape[0] == 600


def test_a_config_file_and_a_folder_work(tokenizer, tmp_path):
    (tmp_path / "config.json").write_text(
        json.dumps({**LLAMA, "architectures": ["LlamaForCausalLM"], "unknown_key": 1})
    )
    for name in (tmp_path / "config.json", tmp_path):
        assert CAUSAL.build_model(None, str(name), seed=1, processor=tokenizer).config.hidden_size == 16


def test_a_saved_model_is_loaded_in_float32(tokenizer, tmp_path):
    model = CAUSAL.build_model(None, LLAMA, seed=1, processor=tokenizer, dtype="bfloat16")
    assert model.dtype == torch.bfloat16
    model.save_pretrained(tmp_path)
    notes: list[str] = []
    loaded = CAUSAL.build_model(str(tmp_path), None, seed=1, processor=tokenizer, notes=notes)
    assert loaded.dtype == torch.float32
    assert notes == []
    stored = load_file(tmp_path / "model.safetensors")["model.embed_tokens.weight"]
    assert torch.equal(loaded.state_dict()["model.embed_tokens.weight"], stored.float())


def test_the_attention_can_be_chosen(tokenizer):
    model = CAUSAL.build_model(None, LLAMA, seed=1, processor=tokenizer, attn_implementation="eager")
    assert model.config._attn_implementation == "eager"


def test_pickled_weights_are_refused(tokenizer, tmp_path):
    model = CAUSAL.build_model(None, LLAMA, seed=1, processor=tokenizer)
    model.config.save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(InputError, match="safetensors"):
        CAUSAL.build_model(str(tmp_path), None, seed=1, processor=tokenizer)


def test_truncated_weights_are_one_message(tokenizer, tmp_path):
    CAUSAL.build_model(None, LLAMA, seed=1, processor=tokenizer).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(InputError, match=r"model_name_or_path.*cannot be loaded"):
        CAUSAL.build_model(str(tmp_path), None, seed=1, processor=tokenizer)


@pytest.mark.parametrize(
    ("name", "config", "expected"),
    [
        (None, None, "give one of"),
        ("a", LLAMA, "not both"),
        ("./missing", None, "no such folder"),
        ("owner/name-that-is-not-cached", None, "cannot be loaded"),
        (None, {"model_type": "lama"}, "did you mean 'llama'"),
        (None, {"hidden_size": 8}, "model_type is missing"),
        (None, {**LLAMA, "hiden_size": 8}, r"did you mean 'hidden_size'"),
        (None, {**LLAMA, "hidden_size": "large"}, "is refused"),
        (None, {**LLAMA, "num_attention_heads": 3}, "model_config"),
        (None, "/missing/config.json", "cannot be read"),
    ],
)
def test_faults(tokenizer, name, config, expected):
    with pytest.raises(InputError, match=expected) as caught:
        CAUSAL.build_model(name, config, seed=1, processor=tokenizer)
    assert "Fix: " in str(caught.value)


def test_an_encoder_cannot_be_a_causal_model_of_another_kind(tokenizer):
    with pytest.raises(InputError, match="no AutoModelForCausalLM can be built"):
        CAUSAL.build_model(None, {"model_type": "vit"}, seed=1, processor=tokenizer)


def test_broken_config_files(tmp_path):
    path = tmp_path / "config.json"
    for content, expected in (("{", "broken JSON"), ("[1]", "not a JSON object"), ("{}", "model_type is missing")):
        path.write_text(content)
        with pytest.raises(InputError, match=expected):
            models.load_config(None, str(path))


def test_positions_of_families():
    assert models.positions(models.load_config(None, LLAMA)) == 64
    assert models.positions(models.load_config(None, {"model_type": "gpt2", "n_positions": 32})) == 32
    roberta = {"model_type": "roberta", "max_position_embeddings": 514, "pad_token_id": 1}
    assert models.positions(models.load_config(None, roberta)) == 512
    assert models.positions(models.load_config(None, {"model_type": "mamba"})) is None


def test_an_empty_folder_has_no_tokenizer(tmp_path):
    with pytest.raises(InputError, match="tokenizer_name_or_path"):
        models.load_tokenizer(str(tmp_path))
