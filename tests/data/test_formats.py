"""Formats are recognised from their columns, and exactly the answers are trained on, whatever the template."""

from __future__ import annotations

import pytest
from datasets import Dataset

from thrifty.data.encode import IGNORED
from thrifty.data.formats import FORMATS, detect_format, rename_columns
from thrifty.data.options import DataOptions
from thrifty.data.prepare import prepare_causal
from thrifty.errors import InputError

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Writes an empty thought into the last answer only, as some current templates do: beginnings do not match the whole.
THINKING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.last %}<think>\n\n</think>\n\n{% endif %}"
    "{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
USER = {"role": "user", "content": "What is it?"}
ASSISTANT = {"role": "assistant", "content": "It is light."}


def stretches(prepared, tokenizer, index=0):
    """Decodes a sample into its trained and its other stretches."""
    row = prepared.dataset[index]
    out = []
    for token, label in zip(row["input_ids"], row["labels"], strict=True):
        assert label in (IGNORED, token)
        if not out or out[-1][1] != (label != IGNORED):
            out.append([[], label != IGNORED])
        out[-1][0].append(token)
    return [(tokenizer.decode(ids), trained) for ids, trained in out]


def prepared(tokenizer, rows, **options):
    return prepare_causal(Dataset.from_list(rows), tokenizer, DataOptions(**options))


def chat(tokenizer, template, eos="<|im_end|>"):
    tokenizer.chat_template = template
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.eos_token = eos
    return tokenizer


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        (["text", "id"], "text"),
        (["prompt", "completion"], "prompt-completion"),
        (["messages", "text"], "messages"),
        (["instruction", "output"], "alpaca"),
        (["instruction", "input", "output", "text"], "alpaca"),
        (["conversations"], "sharegpt"),
        (["input_ids", "labels"], "tokenized"),
    ],
)
def test_detection(columns, expected):
    assert detect_format(columns) == expected
    assert expected in FORMATS


def test_unknown_columns_and_formats_are_answered():
    with pytest.raises(InputError, match=r"'txet' \(did you mean 'text'\?\)"):
        detect_format(["txet", "n"])
    with pytest.raises(InputError, match=r"did you mean 'alpaca'"):
        detect_format(["text"], "alpacca")
    with pytest.raises(InputError, match="not completion"):
        detect_format(["prompt"], "prompt-completion")


def test_columns_are_renamed_and_faults_named():
    data = Dataset.from_list([{"frage": "a", "antwort": "b", "text": "c"}])
    options = DataOptions(column_mapping={"frage": "prompt", "antwort": "completion"})
    assert rename_columns(data, options).column_names == ["prompt", "completion", "text"]
    renamed = rename_columns(data, DataOptions(text_column="frage"))
    assert renamed["text"][0] == "a"
    assert renamed.column_names == ["text", "antwort"]
    with pytest.raises(InputError, match="did you mean 'antwort'"):
        rename_columns(data, DataOptions(column_mapping={"antwrt": "completion"}))
    with pytest.raises(InputError, match="has a column 'text' already"):
        rename_columns(data, DataOptions(column_mapping={"frage": "text"}))


def test_text(tokenizer):
    result = prepared(tokenizer, [{"text": "Let there be light."}])
    assert stretches(result, tokenizer) == [("Let there be light.<|endoftext|>", True)]
    assert "format: text" in result.notes[0]


def test_prompt_and_completion(tokenizer):
    rows = [{"prompt": "God said:", "completion": " Let there be light."}]
    result = prepared(tokenizer, rows)
    assert stretches(result, tokenizer) == [("God said:", False), (" Let there be light.<|endoftext|>", True)]
    assert "trained on: the answers only" in result.notes[0]
    everything = prepared(tokenizer, rows, train_on_prompt=True)
    assert stretches(everything, tokenizer) == [("God said: Let there be light.<|endoftext|>", True)]


def test_an_answer_that_holds_the_end_already_gets_no_second_one(tokenizer):
    result = prepared(tokenizer, [{"prompt": "a", "completion": " b<|endoftext|>"}])
    assert result.dataset[0]["input_ids"].count(0) == 1


def test_alpaca_with_and_without_input(tokenizer):
    rows = [
        {"instruction": "Translate.", "input": "lux", "output": "light"},
        {"instruction": "Speak.", "input": None, "output": "Yes."},
    ]
    result = prepared(tokenizer, rows)
    expected = "### Instruction:\nTranslate.\n\n### Input:\nlux\n\n### Response:\n"
    assert stretches(result, tokenizer) == [(expected, False), ("light<|endoftext|>", True)]
    assert "Input" not in stretches(result, tokenizer, 1)[0][0]


def test_alpaca_uses_a_chat_template_where_there_is_one(tokenizer):
    result = prepared(chat(tokenizer, CHATML), [{"instruction": "Translate.", "input": "lux", "output": "light"}])
    expected = "<|im_start|>user\nTranslate.\n\nlux<|im_end|>\n<|im_start|>assistant\n"
    assert stretches(result, tokenizer) == [(expected, False), ("light<|im_end|>", True), ("\n", False)]


def test_messages_train_on_every_answer_and_nothing_else(tokenizer):
    messages = [{"role": "system", "content": "Be brief."}, USER, ASSISTANT, USER, {**ASSISTANT, "content": "So."}]
    result = prepared(chat(tokenizer, CHATML), [{"messages": messages}])
    found = stretches(result, tokenizer)
    assert [text for text, trained in found if trained] == ["It is light.<|im_end|>", "So.<|im_end|>"]
    assert found[0][0].endswith("<|im_start|>assistant\n")
    assert "Be brief." in found[0][0]
    assert "".join(text for text, _ in found) == tokenizer.apply_chat_template(messages, tokenize=False)


def test_a_template_that_writes_the_last_answer_differently(tokenizer):
    messages = [USER, ASSISTANT, USER, {**ASSISTANT, "content": "So."}]
    result = prepared(chat(tokenizer, THINKING), [{"messages": messages}])
    found = [text for text, trained in stretches(result, tokenizer) if trained]
    assert found == ["It is light.<|im_end|>", "<think>\n\n</think>\n\nSo.<|im_end|>"]


def test_sharegpt_and_messages_with_equal_content_are_equal(tokenizer):
    chat(tokenizer, CHATML)
    theirs = [{"from": "human", "value": USER["content"]}, {"from": "gpt", "value": ASSISTANT["content"]}]
    one = prepared(tokenizer, [{"conversations": theirs}])
    other = prepared(tokenizer, [{"messages": [USER, ASSISTANT]}])
    assert one.dataset[0] == other.dataset[0]


def test_conversational_prompt_and_completion(tokenizer):
    earlier = {"role": "assistant", "content": "Earlier."}
    rows = [{"prompt": [USER, earlier, USER], "completion": [ASSISTANT]}]
    result = prepared(chat(tokenizer, CHATML), rows)
    assert [text for text, trained in stretches(result, tokenizer) if trained] == ["It is light.<|im_end|>"]


def test_without_a_template_a_plain_one_is_used_and_kept(tokenizer):
    result = prepared(tokenizer, [{"messages": [USER, ASSISTANT, USER, ASSISTANT]}])
    found = stretches(result, tokenizer)
    assert found[0] == ("User: What is it?\nAssistant:", False)
    assert [text for text, trained in found if trained] == [" It is light.<|endoftext|>"] * 2
    assert tokenizer.apply_chat_template([USER], tokenize=False, add_generation_prompt=True) == found[0][0]
    assert any("no chat template" in note for note in result.notes)


def test_the_end_is_added_where_the_template_forgets_it(tokenizer):
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    result = prepared(chat(tokenizer, template, eos="<|endoftext|>"), [{"messages": [USER, ASSISTANT]}])
    assert result.dataset[0]["labels"][-1] == tokenizer.eos_token_id == 0


def test_the_beginning_of_a_template_is_not_doubled(tokenizer):
    template = "{{ bos_token }}" + CHATML
    chat(tokenizer, template)
    result = prepared(tokenizer, [{"messages": [USER, ASSISTANT]}])
    assert result.dataset[0]["input_ids"].count(tokenizer.bos_token_id) == 1


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"messages": []}, "conversation is empty"),
        ({"messages": [USER]}, "no message of the assistant"),
        ({"messages": [{"role": "asistant", "content": "x"}]}, "did you mean 'assistant'"),
        ({"messages": [{"speaker": "user", "text": "x"}]}, "not role and content"),
        ({"prompt": "a", "completion": ""}, "completion is empty"),
        ({"prompt": None, "completion": "x"}, "prompt is missing"),
        ({"prompt": "a", "completion": [ASSISTANT]}, "both be strings or both"),
        ({"instruction": "a", "output": 3}, "output is int"),
        ({"text": 3}, "text is int"),
    ],
)
def test_broken_records_are_named(tokenizer, row, expected):
    with pytest.raises(InputError, match=f"record 1: .*{expected}"):
        prepared(tokenizer, [row])


def test_a_template_that_refuses_is_one_message(tokenizer):
    tokenizer.chat_template = "{{ raise_exception('no system messages') }}"
    with pytest.raises(InputError, match=r"refuses the messages .*no system messages"):
        prepared(tokenizer, [{"messages": [USER, ASSISTANT]}])


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"input_ids": [3, 4], "labels": [3]}, "2 input_ids but 1 labels"),
        ({"input_ids": [3, 100_000]}, "holds 100000"),
        ({"input_ids": [3, -1]}, "holds -1"),
        ({"input_ids": [0.5]}, "not a list of token ids"),
        ({"input_ids": [3, 4], "labels": [-100, -100]}, "no token is left"),
    ],
)
def test_tokenized_faults(tokenizer, row, expected):
    with pytest.raises(InputError, match=expected):
        prepared(tokenizer, [row])


def test_tokenized_is_taken_as_it_is(tokenizer):
    result = prepared(tokenizer, [{"input_ids": [5, 6, 7], "labels": [-100, 6, 7]}])
    assert result.dataset[0] == {"input_ids": [5, 6, 7], "labels": [-100, 6, 7], "sample_id": 0}
    assert result.trained_tokens == 2
