"""Padding is known by position; a sample's batch entries do not depend on its neighbours; masks follow the epoch."""

from __future__ import annotations

import pickle

import torch

from thrifty.data.collate import CausalCollator, ClassificationCollator, MaskingCollator


def sample(*ids, **more):
    return {"input_ids": list(ids), "labels": list(ids), **more}


def test_padding_shares_the_end_token_and_stays_unlabelled():
    batch = CausalCollator(pad_token_id=0)([sample(5, 6, 0, sample_id=7), sample(5, 0, sample_id=9)])
    assert batch["input_ids"].tolist() == [[5, 6, 0], [5, 0, 0]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 1, 0]]
    assert batch["labels"].tolist() == [[5, 6, 0], [5, 0, -100]]
    assert batch["sample_id"].tolist() == [7, 9]
    assert all(value.dtype == torch.int64 for value in batch.values())


def test_no_mask_where_nothing_is_padded():
    batch = CausalCollator(pad_token_id=0)([sample(5, 0), sample(6, 0)])
    assert sorted(batch) == ["input_ids", "labels"]
    batch = CausalCollator(pad_token_id=0, pad_to_multiple_of=4)([sample(5, 6)])
    assert batch["attention_mask"].tolist() == [[1, 1, 0, 0]]


def masking(**settings):
    return MaskingCollator(
        pad_token_id=1, mask_token_id=2, vocab_size=100, special_token_ids=frozenset({0, 1, 2}), **settings
    )


def test_masks_depend_on_the_sample_and_the_epoch_alone():
    features = [sample(0, *range(10 + index, 60 + index), 0) for index in range(8)]
    collator = masking()
    whole = collator(features)
    halves = [pickle.loads(pickle.dumps(collator))(features[start : start + 4]) for start in (0, 4)]
    for name in whole:
        assert torch.equal(whole[name], torch.cat([half[name] for half in halves]))
    collator.set_epoch(1)
    assert not torch.equal(whole["labels"], collator(features)["labels"])
    collator.set_epoch(0)
    assert torch.equal(whole["input_ids"], collator(features)["input_ids"])
    assert not torch.equal(whole["labels"], masking(seed=1)(features)["labels"])


def test_masking_has_the_right_shares_and_spares_special_tokens():
    features = [sample(0, *[3 + (7 * index + step) % 97 for step in range(500)], 0) for index in range(40)]
    batch = masking(mlm_probability=0.15)(features)
    original = torch.tensor([feature["input_ids"] for feature in features])
    chosen = batch["labels"] != -100
    assert torch.equal(batch["labels"][chosen], original[chosen])
    assert not chosen[:, 0].any()
    assert not chosen[:, -1].any()
    assert torch.equal(batch["input_ids"][~chosen], original[~chosen])
    share = chosen[:, 1:-1].float().mean().item()
    masked = (batch["input_ids"][chosen] == 2).float().mean().item()
    same = (batch["input_ids"][chosen] == original[chosen]).float().mean().item()
    assert abs(share - 0.15) < 0.01
    assert abs(masked - 0.8) < 0.03
    assert abs(same - 0.1) < 0.03


def test_a_short_sample_has_one_masked_token_at_least():
    batch = masking(mlm_probability=1e-9)([sample(0, 5, 0), sample(0, 6, 7, 0)])
    assert (batch["labels"] != -100).sum(1).tolist() == [1, 1]


def test_classification_pads_what_the_tokenizer_gives():
    features = [
        {"input_ids": [5, 6, 7], "token_type_ids": [0, 0, 1], "labels": 1},
        {"input_ids": [5], "token_type_ids": [0], "labels": 0},
    ]
    batch = ClassificationCollator(pad_token_id=9)(features)
    assert batch["input_ids"].tolist() == [[5, 6, 7], [5, 9, 9]]
    assert batch["token_type_ids"].tolist() == [[0, 0, 1], [0, 0, 0]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]
    assert batch["labels"].tolist() == [1, 0]
