"""The example of reinforcement learning of language models learns, and skips what has no gradient."""

import runpy
from pathlib import Path

import pytest

FILE = Path(__file__).parents[2] / "examples" / "rl" / "grpo.py"


@pytest.mark.filterwarnings(
    "ignore:.*gradient_checkpointing:FutureWarning"
)  # trl has the former name
def test_the_model_learns_and_groups_without_a_signal_are_skipped(tmp_path, capsys):
    pytest.importorskip("trl")
    picks = runpy.run_path(str(FILE))["main"](str(tmp_path), steps=40)
    said = capsys.readouterr().out
    assert float(said.split("at the begin, ")[1].split()[0]) > 0.8
    assert 0.2 * picks.rows < picks.rows_trained == picks.groups_with_signal * 8 < 0.9 * picks.rows
    assert "groups with a signal" in said
