import re
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

import pytest
import torch
import typer
from typer.testing import CliRunner

from thresher import methods
from thresher.methods.contract import Card
from thresher.records import Column, Records
from thresher_lab import cli
from thresher_lab.cli.methods import methods as command
from thresher_lab.report import cards
from thresher_lab.report import cards as measured
from thresher_lab.training.store import write_json

ROOT = Path(__file__).parents[3]
COMMAND = "python -m thresher_lab.report.cards docs/methods"
CARD = Card(
    biased="yes",
    forwards="none",
    claim="half the time",
    differences=("One.", "Two."),
    bytes_per_sample=4.5,
    caveat="where nothing is easy",
    missing=("The rest.",),
    summary="do this",
    paper="arXiv:2310.10102",
    rule="{keep} of it {sizes}",
)


@dataclass(frozen=True)
class Base:
    """Has a share.

    Args:
        keep: Share kept.
    """

    keep: float = 0.5


@dataclass(frozen=True)
class Made(Base):
    """Made up.

    Args:
        mode: "a" or
            "b": which | of
            the two.
        scores: A path.
        sizes: Of it, (0, 1): all.

    Raises:
        ValueError: Never.
    """

    stage: ClassVar[str] = "epoch"
    card: ClassVar[Card] = CARD
    mode: Literal["a", "b"] | None = None
    scores: str = field(kw_only=True)
    sizes: tuple[float, ...] = field(default_factory=lambda: (1.0,))
    derived: int = field(init=False, default=0)

    def columns(self):
        """Two, of one signal."""
        return {
            "loss": Column(torch.float32),
            "last": Column(torch.float32, signal="loss"),
            "right": Column(torch.bool),
        }


@dataclass(frozen=True)
class Asks(Made):
    """Asks for a full pass, too."""

    scores: str = "s"

    def columns(self):
        return {**super().columns(), "seen": Column(torch.int16, signal="epoch")}

    def full_pass(self, epoch, epochs):
        return ("error", "feature") if epoch == 5 else ("error",) if epoch else ()


@pytest.fixture
def registered(monkeypatch):
    def register(kind, **known):
        info = methods.MethodInfo(f"{__name__}:made", "epoch", "from elsewhere")
        monkeypatch.setattr(methods, "infos", lambda: {"made": info})
        monkeypatch.setattr(methods, "load", lambda name: kind)

    return register


def test_a_card_says_what_is_known(registered):
    registered(Made)
    assert cards.card_page("made").split("\n\n") == [
        "# made",
        f"`{__name__}.Made`: do this.",
        "- **Paper:** [arXiv:2310.10102](https://arxiv.org/abs/2310.10102).\n"
        "- **Decides:** Before each epoch.\n"
        "- **Signals:** None.\n"
        "- **Remembers of each sample:** 4.5 bytes.\n"
        "- **Extra forward passes:** None.\n"
        "- **Biased:** Yes.\n"
        "- **Published:** Half the time.\n"
        "- **Skips a sample:** `keep` of it `sizes`.",
        "## Settings",
        "| setting | type | default | meaning |\n"
        "| --- | --- | --- | --- |\n"
        "| `keep` | float | `0.5` | Share kept. |\n"
        '| `mode` | "a" or "b" or None | `None` | "a" or "b": which \\| of the two. |\n'
        "| `scores` | str | none, must be given | A path. |\n"
        "| `sizes` | tuple[float, ...] | `(1.0,)` | Of it, (0, 1): all. |",
        "## Differences to the official code",
        "- One.\n- Two.",
        "## What is missing",
        "- The rest.",
        "## Caveat",
        "Where nothing is easy.\n",
    ]


def test_what_a_method_needs_is_what_fills_its_columns_and_what_its_full_pass_returns(registered):
    assert cards.signals_of(Asks) == ("loss", "right", "error", "feature")
    registered(Asks)
    assert "- **Signals:** `loss`, `right`, `error`, `feature`.\n" in cards.card_page("made")


def test_a_class_must_have_a_card_and_say_what_its_settings_mean(registered):
    @dataclass(frozen=True)
    class Silent(Made):
        """Says nothing of this."""

        new: float = 1.0

    registered(Silent)
    with pytest.raises(
        ValueError, match="Silent: the Args section of its docstring does not explain new"
    ):
        cards.card_page("made")
    registered(Base)
    with pytest.raises(ValueError, match="made has no card: give Base a class attribute `card`"):
        cards.card_page("made")


def row(method, control_of=None, mean=0.9, difference: Any = -0.012, **more):
    found = {
        "method": method,
        "control_of": control_of,
        "mean": mean,
        "std": 0.01,
        "difference": difference,
    }
    return (
        found
        | {"ci95": [-0.02, 0.004], "cost_ratio": 0.5, "cpu_ratio": 0.625, "verdict": "v"}
        | more
    )


FULL = row("full", difference=None, ci95=None, std=None, cost_ratio=1.0, verdict="the baseline")
SUMMARY = [
    FULL,
    row("made:keep=0.3 once"),
    row("uniform@0.500", "made:keep=0.3 once"),
    row("made2"),
    row("shorter@0.500", "made2"),
    row("made", mean=0.8, cpu_ratio=None),
    row("shorter@0.510", "made"),
    row("uniform:keep=0.3"),
]


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("made", ["full", "made:keep=0.3 once", "uniform@0.500", "made", "shorter@0.510"]),
        ("made2", ["full", "made2", "shorter@0.500"]),
        ("uniform", ["full", "uniform:keep=0.3"]),
        ("full", ["full"]),
        ("other", []),
    ],
)
def test_a_method_is_shown_with_its_own_controls(name, found):
    assert [row["method"] for row in measured.method_rows(name, SUMMARY)] == found


def test_what_was_reached_is_quoted_from_every_comparison(registered, tmp_path):
    runs = [
        {"method": "full", "metric": {"name": "accuracy", "value": 0.9}, "seed": seed}
        for seed in (0, 1)
    ]
    results = {"task": "digits", "epochs": 3, "device": "cpu", "runs": runs, "summary": SUMMARY}
    of_loss = [{"method": "full", "metric": {"name": "R2", "value": 7.0}, "seed": 0}]
    registered(Made)
    write_json(tmp_path / "b.json", results | {"runs": of_loss})
    write_json(tmp_path / "a.json", results)
    write_json(tmp_path / "other.json", {"benchmark": "overhead"})
    write_json(tmp_path / "without.json", results | {"summary": [FULL]})
    _, _, measured = cards.card_page("made", tmp_path).partition("## What it reached here\n\n")
    said, *parts = measured.strip().split("\n\n")
    assert "mean ± standard deviation" in said
    assert parts == [
        "### `digits`, 3 epochs, 2 seeds, cpu",
        "From `a.json`.",
        "|  | accuracy, % | difference to full | cost | CPU time | verdict |\n"
        "| --- | --- | --- | --- | --- | --- |\n"
        "| `full` | 90.00 |  | 1.000 | 0.62 | the baseline |\n"
        "| `made:keep=0.3 once` | 90.00 ± 1.00 | -1.20 [-2.00, +0.40] | 0.500 | 0.62 | v |\n"
        "| uniform@0.500 | 90.00 ± 1.00 | -1.20 [-2.00, +0.40] | 0.500 | 0.62 | v |\n"
        "| `made` | 80.00 ± 1.00 | -1.20 [-2.00, +0.40] | 0.500 |  | v |\n"
        "| shorter@0.510 | 90.00 ± 1.00 | -1.20 [-2.00, +0.40] | 0.500 | 0.62 | v |",
        "### `digits`, 3 epochs, 1 seed, cpu",
        "From `b.json`.",
        "|  | R2 | difference to full | cost | CPU time | verdict |\n"
        "| --- | --- | --- | --- | --- | --- |\n"
        "| `full` | 0.9000 |  | 1.000 | 0.62 | the baseline |\n"
        "| `made:keep=0.3 once` | 0.9000 ± 0.0100 | -0.0120 [-0.0200, +0.0040] | 0.500 | 0.62 | v |\n"
        "| uniform@0.500 | 0.9000 ± 0.0100 | -0.0120 [-0.0200, +0.0040] | 0.500 | 0.62 | v |\n"
        "| `made` | 0.8000 ± 0.0100 | -0.0120 [-0.0200, +0.0040] | 0.500 |  | v |\n"
        "| shorter@0.510 | 0.9000 ± 0.0100 | -0.0120 [-0.0200, +0.0040] | 0.500 | 0.62 | v |",
    ]
    (tmp_path / "a.json").unlink()
    (tmp_path / "b.json").unlink()
    assert cards.card_page("made", tmp_path).endswith(
        "## What it reached here\n\nNot measured yet.\n"
    )


@pytest.mark.parametrize("name", sorted(methods.BUILT_IN | methods.FOR_POSITIONS))
def test_every_method_has_a_card_that_names_its_settings_and_what_it_remembers(name):
    kind = methods.load(name)
    card = cards.card_page(name)
    assert card.startswith(f"# {name}\n\n`thresher.{kind.__name__}`: ")
    assert all(f"\n| `{setting}` | " in card for setting in cards.setting_meanings(kind))
    assert kind.card.summary and kind.card.rule and kind.card.biased and kind.card.forwards
    if kind.stage == "epoch":
        assert (
            kind.card.bytes_per_sample
            == Records(kind().columns(), 0, torch.device("cpu")).bytes_per_sample
        )


@pytest.mark.parametrize("name", ["full", "kakurenbo"])
def test_the_command_prints_a_card(name, capsys):
    command(name)
    printed = capsys.readouterr().out
    assert name in printed and "Settings" in printed and "**" not in printed


def test_an_unknown_name_is_one_message_that_lists_the_others(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["thresher", "methods", "kakurembo"])
    with pytest.raises(SystemExit) as left:
        cli.main()
    captured = capsys.readouterr()
    assert left.value.code == 2 and not captured.out
    assert (
        captured.err.startswith(
            "thresher: no method 'kakurembo'; did you mean 'kakurenbo'? There are "
        )
        and "kakurenbo" in captured.err
    )


def test_the_pages_are_those_of_the_classes_and_results():
    folder = ROOT / "docs" / "methods"
    expected = cards.all_pages(ROOT / cards.COMPARISONS)
    others = ("README.md", cards.BY_HAND)
    found = {
        path.name: path.read_text(encoding="utf-8")
        for path in folder.glob("*.md")
        if path.name not in others
    }
    other = sorted(
        name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name)
    )
    assert not other, (
        f"{', '.join(other)} in docs/methods differ; run `{COMMAND}`, and delete what has no method"
    )


def test_links_between_the_pages_lead_somewhere():
    folder = ROOT / "docs" / "methods"
    for path in folder.glob("*.md"):
        for target in re.findall(r"\]\((?!https://)([^)]+)\)", path.read_text(encoding="utf-8")):
            assert (path.parent / target).exists(), f"{path.name}: {target}"


def test_writing_needs_the_results_and_makes_the_folder(tmp_path):
    app = typer.Typer()
    app.command()(cards.write_pages)
    done = CliRunner().invoke(app, [str(tmp_path), "--results", str(tmp_path / "none")])
    said = " ".join(
        done.output.replace("│", " ").split()
    )  # the frame of the message wraps a long path anywhere
    assert done.exit_code == 2 and "--results" in said and "does not exist" in said
    (tmp_path / "results").mkdir()
    cards.write_pages(tmp_path / "docs" / "methods", tmp_path / "results")
    written = {path.name for path in (tmp_path / "docs" / "methods").iterdir()}
    assert written == {f"{name}.md" for name in methods.BUILT_IN | methods.FOR_POSITIONS}
    assert "Not measured yet." in (tmp_path / "docs" / "methods" / "full.md").read_text()
