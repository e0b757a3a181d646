"""The docstring check finds what it must refuse, on the right line, and leaves good docstrings alone."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).parents[3] / "tools" / "check_docstrings.py"
SPEC = importlib.util.spec_from_file_location("check_docstrings", TOOL)
check_docstrings = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(check_docstrings)

GOOD = '''"""Random numbers."""

from dataclasses import dataclass


def draw(count, *names, seed=0, **settings):
    """Draws numbers.

    Args:
        count: Number of draws; of these
            Of the draws, none is lost in a second line that opens so.
        *names: Names of the draws.
        seed (int): Random seed of the draws.
        **settings: Settings by name.

    Returns:
        What is drawn, in a section where the word may open a line: the kept samples, the hidden layer.
    """


@dataclass
class Settings:
    """Settings.

    Args:
        seed: Random seed of the draws.
    """

    seed: int
    other: int = 0


class Child(Settings):
    """A class with parameters that it inherits.

    Args:
        seed: Random seed of the draws.
    """


def _private(count, seed):
    """Draws.

    Args:
        count:
            Number of draws.
    """


def undocumented(count):
    """Draws."""


class Plain:
    """A class.

    Attributes:
        seed: Of the draws, which is not an argument.
    """

    def method(self, count):
        """Draws.

        Args:
            count: Number of draws.
        """
'''


def test_good_docstrings_pass():
    assert check_docstrings.check_source(GOOD) == []


@pytest.mark.parametrize("word", ["Of", "As", "That", "Likewise", "Whose", "What"])
@pytest.mark.parametrize("ending", [" the draws.", ".", ":", ", of draws."])
def test_openings_that_say_nothing(word, ending):
    source = f'def draw(seed):\n    """Draws.\n\n    Args:\n        seed: {word}{ending}\n    """\n'
    wrong = f"the text of `seed` opens with {word!r}; open with a noun that says what it is"
    assert check_docstrings.check_source(source) == [(5, "draw", wrong)]


def test_openings_of_help_texts():
    source = 'option(help="Of the draws.")\noption(help="Seed of the draws.")\noption(help=None)\n'
    wrong = "the text of `help` opens with 'Of'; open with a noun that says what it is"
    assert check_docstrings.check_source(source) == [(1, "module", wrong)]


@pytest.mark.parametrize(
    "text",
    [
        "Offset of the rows.",
        "Asymmetric.",
        "Thatched.",
        "of draws",
        "A seed. Of draws.",
        "Whatever.",
    ],
)
def test_other_openings_pass(text):
    assert (
        check_docstrings.check_source(
            f'def draw(seed):\n    """Draws.\n\n    Args:\n        seed: {text}\n    """\n'
        )
        == []
    )


def test_an_opening_on_the_line_after_the_name():
    source = 'def draw(seed):\n    """Draws.\n\n    Args:\n        seed:\n            Of the draws.\n    """\n'
    assert [line for line, *_ in check_docstrings.check_source(source)] == [5]


@pytest.mark.parametrize(
    ("source", "name", "wrong"),
    [
        (
            "def draw(seed): '''D.\n\nArgs:\n    sed: Seed.\n    seed: Seed.\n'''",
            "draw",
            "`sed` is documented, but is no parameter",
        ),
        (
            "def draw(n, seed): '''D.\n\nArgs:\n    seed: Seed.\n'''",
            "draw",
            "`n` is a parameter, but is not documented",
        ),
        (
            "async def draw(*, n, seed): '''D.\n\nArgs:\n    seed: Seed.\n'''",
            "draw",
            "`n` is a parameter, but is not documented",
        ),
        (
            "def draw(seed, **more): '''D.\n\nArgs:\n    seed: Seed.\n'''",
            "draw",
            "`more` is a parameter, but is not documented",
        ),
        (
            "class A:\n  '''D.\n\n  Args:\n      n: N.\n  '''\n  def __init__(self): pass",
            "A",
            "`n` is documented, but is no parameter",
        ),
        (
            "class A:\n  '''D.\n\n  Args:\n      n: N.\n  '''\n  m: int",
            "A",
            "`n` is documented, but is no parameter",
        ),
        (
            "class A:\n  def f(self, n, k):\n    '''D.\n\n    Args:\n        n: N.\n    '''",
            "A.f",
            "`k` is a parameter, but is not documented",
        ),
    ],
)
def test_parameters_that_differ(source, name, wrong):
    assert [found[1:] for found in check_docstrings.check_source(source)] == [(name, wrong)]


@pytest.mark.parametrize(
    "text",
    [
        "Every so-manieth sample.",
        "One call, heard out.",
        "Settings that stand for themselves.",
        "Counts the kept.",
        "All of the told is kept.",
        "The hidden\n    stay",
    ],
)
def test_unclear_words(text):
    for source in (
        f'"""{text}"""',
        f'class A:\n    """A.\n\n    {text}\n    """',
        f'def f():\n    """{text}"""',
    ):
        ((line, name, wrong),) = check_docstrings.check_source(source)
        assert "is not clear; " in wrong and line == (
            4 if name == "A" else 1 if name == "module" else 2
        )


@pytest.mark.parametrize(
    "text", ["Trains the kept samples.", "The hidden size.", "They stand side by side."]
)
def test_clear_words(text):
    assert check_docstrings.check_source(f'"""{text}"""') == []


def test_the_command_prints_file_line_name_and_fault_and_fails(tmp_path):
    (tmp_path / "good.py").write_text(GOOD)
    bad = tmp_path / "below" / "bad.py"
    bad.parent.mkdir()
    bad.write_text(
        'class A:\n    def draw(self, seed):\n        """Draws.\n\n        Args:\n            seed: Of it.\n        """\n'
    )
    done = subprocess.run([sys.executable, TOOL, tmp_path], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (1, "")
    assert (
        done.stdout
        == f"{bad}:6: A.draw: the text of `seed` opens with 'Of'; open with a noun that says what it is\n"
    )


def test_the_command_passes_good_files(tmp_path, capsys):
    (tmp_path / "good.py").write_text(GOOD)
    assert check_docstrings.main([str(tmp_path), str(tmp_path / "good.py")]) == 0
    assert capsys.readouterr().out == ""
