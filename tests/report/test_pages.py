from __future__ import annotations

import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import yaml

from thrifty.errors import InputError
from thrifty.report import write_all
from thrifty.report.card import write_card
from thrifty.report.describe import environment_entries
from thrifty.report.html import write_report
from thrifty.report.links import pieces
from thrifty.report.metrics import MetricsLog
from thrifty.report.summary import read_summary, versions, write_summary

EVIL = "<script>alert('x')</script>\"><img src=x onerror=alert(1)> $x$ `a` {{ 7 * 7 }} 你好"

METHODS = [
    {
        "name": "lora",
        "title": "LoRA",
        "settings": "r=8",
        "reason": "Few weights.",
        "source": "Hu 2021, arXiv:2106.09685",
    },
    "bf16",
]


class Page(HTMLParser):
    """Collects tags with attributes, checks that they nest, and keeps the visible text."""

    VOID = frozenset({"meta", "input", "br", "img", "link", "hr"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.text = ""
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if not {"style", "script"} & set(self.open):
            self.text += data

    def named(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]


def make_run(folder: Path, steps: int = 80, evals: int = 4, nan: tuple[int, ...] = (), **fields: Any) -> Path:
    folder.mkdir(exist_ok=True)
    log = MetricsLog(folder / "metrics.jsonl")
    log.start()
    for step in range(1, steps + 1):
        log.log_train(
            step, loss=math.nan if step in nan else 2 + 5 / step, learning_rate=1e-3 / step, tokens=step * 100,
            tokens_per_second=None if step == 1 else 1000.0, memory_bytes=2**28 + step, wall_seconds=step / 7,
        )  # fmt: skip
        if evals and step % max(1, steps // evals) == 0:
            log.log_eval(step, eval_loss=2.5 + 4 / step, eval_runtime=1.0)
    (folder / "run.yaml").write_text("task: causal-lm\nlearning_rate: 0.001\nmethods:\n  - lora\n")
    defaults: dict[str, Any] = {
        "task": "causal-lm", "eval_loss": 2.55, "perplexity": 12.8, "steps": steps, "methods": METHODS,
        "sample_text": "In the beginning", "hardware": {"device": "cpu", "memory_bytes": 2**33},
    }  # fmt: skip
    write_summary(folder, **{**defaults, **fields})
    return folder


def test_a_report_is_whole_and_loads_nothing(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", nan=(7, 8), prompt="And ")
    paths = write_all(run)
    assert [path.name for path in paths] == ["loss.png", "README.md", "report.html"]
    text = paths[-1].read_text(encoding="utf-8")
    page = Page(text)
    for tag, attributes in page.tags:
        assert tag not in {"link", "img", "iframe", "object", "embed", "source", "base"}
        assert not {"src", "srcset", "xlink:href", "background", "action"} & attributes.keys()
        if "href" in attributes:
            assert tag == "a"
    assert "@import" not in text
    assert "url(" not in text
    addresses = set(re.findall(r"https?://[^\"'<\s]+", text))
    # A link to a source, and the name of SVG's namespace, which nobody fetches.
    assert addresses == {"https://arxiv.org/abs/2106.09685", "http://www.w3.org/2000/svg"}
    assert len(page.named("svg")) == 5  # the loss twice: whole, and without the first steps
    for expected in ("2.550", "12.80", "LoRA", "Few weights.", "And In the beginning", "learning_rate", "8.0 GiB"):
        assert expected in page.text
    assert "2 logged losses were not finite (first at step 7)" in page.text
    assert {"report.html", "loss.png"} - {attributes["href"] for attributes in page.named("a")} == {"report.html"}


def test_the_hover_data_agrees_with_the_metrics(tmp_path: Path) -> None:
    page = Page(write_report(make_run(tmp_path / "run", steps=20)).read_text(encoding="utf-8"))
    data = json.loads(page.named("svg")[0]["data-hover"] or "")
    train, validation = data["lines"]
    assert data["title"] == [f"step {step}" for step in range(1, 21)]
    assert data["note"][6] == "700 tokens · 1.0 s"
    assert train["text"][:2] == ["7.000", "4.500"]
    assert [index + 1 for index, text in enumerate(validation["text"]) if text] == [5, 10, 15, 20]
    assert sorted(data["x"]) == data["x"]
    assert sorted(train["y"]) == train["y"]  # the loss falls, and SVG counts downwards


def test_text_of_the_user_stays_text(tmp_path: Path) -> None:
    methods = [{"name": EVIL, "title": EVIL, "settings": EVIL, "reason": EVIL, "source": f"javascript:alert(1) {EVIL}"}]
    run = make_run(
        tmp_path / "<b>run",
        methods=methods,
        sample_text=EVIL,
        prompt=EVIL,
        model=EVIL,
        data=EVIL,
        hardware={EVIL: EVIL},
    )
    (run / "run.yaml").write_text(yaml.safe_dump({"task": EVIL, EVIL: EVIL}), encoding="utf-8")
    page = Page(write_report(run).read_text(encoding="utf-8"))
    assert len(page.named("script")) == 1
    assert not page.named("img")
    assert not page.named("b")
    assert page.text.count(EVIL) >= 8
    assert not [a for a in page.named("a") if str(a["href"]).startswith("javascript")]

    card = write_card(run).read_text(encoding="utf-8")
    prose = re.sub(r"(`+)(?!`).*?(?<!`)\1(?!`)", "", card.split("---\n", 2)[2], flags=re.S)
    assert "script" in prose
    assert not re.search(r"(?<!\\)<(?!!--)", prose)
    assert yaml.safe_load(card.split("---\n")[1])["tags"][-1] == EVIL


@pytest.mark.parametrize(
    ("steps", "evals", "nan"),
    [(0, 0, ()), (1, 0, ()), (1, 1, ()), (1, 1, (1,)), (40, 0, ()), (40, 4, tuple(range(1, 41))), (3, 3, (2,))],
)
def test_sparse_runs_render(tmp_path: Path, steps: int, evals: int, nan: tuple[int, ...]) -> None:
    run = make_run(tmp_path / "run", steps=steps, evals=evals, nan=nan)
    picture, _, report = write_all(run)
    assert picture.read_bytes().startswith(b"\x89PNG")
    page = Page(report.read_text(encoding="utf-8"))
    drawn = any("data-hover" in attributes for attributes in page.named("svg")[:1])
    assert drawn == (steps > 0)
    for attributes in page.named("path") + page.named("circle") + page.named("line"):
        assert "nan" not in " ".join(str(value) for value in attributes.values())


def test_a_run_without_metrics_methods_or_configuration_renders(tmp_path: Path) -> None:
    write_summary(tmp_path, eval_loss=math.nan, methods=[])
    page = Page(write_report(tmp_path).read_text(encoding="utf-8"))
    assert "No method" in page.text
    assert "Configuration" not in page.text
    assert "nan" in page.text  # said, not hidden
    with pytest.raises(InputError, match=r"summary\.json"):
        write_report(tmp_path / "elsewhere")


def test_summary_is_strict_json_with_versions(tmp_path: Path) -> None:
    path = write_summary(tmp_path, eval_loss=math.inf, steps=3)
    raw = json.loads(path.read_text(), parse_constant=lambda name: pytest.fail(name))
    assert raw["eval_loss"] == "Infinity"
    assert raw["versions"] == versions()
    assert raw["versions"].keys() >= {"python", "thrifty", "torch", "transformers"}
    assert read_summary(tmp_path)["eval_loss"] == math.inf
    with pytest.raises(TypeError):
        write_summary(tmp_path, steps=object())
    assert read_summary(tmp_path)["steps"] == 3
    path.write_text('{"steps": ')
    with pytest.raises(InputError, match="not JSON"):
        read_summary(tmp_path)


def test_card_has_the_front_matter_of_the_hub(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", eval_accuracy=0.75)
    (run / "run.yaml").write_text("model_name_or_path: org/small-model\ndataset_name: org/data\nlearning_rate: 3e-4\n")
    card = write_card(run).read_text(encoding="utf-8")
    front = yaml.safe_load(card.split("---\n")[1])
    assert front == {
        "library_name": "transformers", "pipeline_tag": "text-generation", "base_model": "org/small-model",
        "datasets": ["org/data"], "tags": ["thrifty", "causal-lm", "lora", "bf16"],
    }  # fmt: skip
    for line in (
        "| validation loss | 2.550 |",
        "| accuracy | 0.7500 |",
        "| `learning_rate` | `0.0003` |",
        "1. **LoRA** (`r=8`): Few weights.",
        "   Source: Hu 2021, [arXiv:2106.09685](https://arxiv.org/abs/2106.09685)",
        'model = AutoModelForCausalLM.from_pretrained("run")',
    ):
        assert line in card.splitlines()


def test_a_local_folder_is_no_hub_id(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    (run / "run.yaml").write_text(f"model_name_or_path: {tmp_path}\n")
    assert "base_model" not in yaml.safe_load(write_card(run).read_text().split("---\n")[1])


def test_a_card_taken_over_is_left_alone_and_a_blank_form_is_not(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    card = write_card(run)
    written = card.read_text()
    card.write_text("# My own words\n")
    assert write_card(run).read_text() == "# My own words\n"
    card.write_text("# Model Card for Model ID\n\n[More Information Needed]\n")
    assert write_card(run).read_text() == written


def test_links_only_to_web_addresses() -> None:
    assert pieces(["javascript:alert(1)", "see https://a.org/b?c=1."]) == [
        ("javascript:alert(1); see ", None), ("a.org/b?c=1", "https://a.org/b?c=1"), (".", None),
    ]  # fmt: skip


@pytest.mark.parametrize("kind", [list, tuple])
def test_accelerators_are_named_whether_the_summary_was_read_or_just_made(kind) -> None:
    gpu = {"name": "NVIDIA L4", "kind": "cuda", "memory_bytes": 24 * 2**30, "free_bytes": None}
    entries = dict(environment_entries({"hardware": {"accelerators": kind([gpu, gpu]), "memory_bytes": 2**33}}))
    assert entries == {"accelerators": "NVIDIA L4, 24.0 GiB; NVIDIA L4, 24.0 GiB", "memory": "8.0 GiB"}
    assert dict(environment_entries({"hardware": {"accelerators": kind()}})) == {"accelerators": "none"}
