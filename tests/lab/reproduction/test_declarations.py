"""The TOML files of the papers: what a mistake in one says, and how claims get their runs."""

import tomllib
from importlib.resources import files

import pytest

from thresher_lab.reproduction import ada_selection, diet_sb, kakurenbo, selective_backprop
from thresher_lab.reproduction.ada_selection import RATES, row_name
from thresher_lab.reproduction.declarations import parse_paper, read_paper

FUNCTIONS = selective_backprop
TEXT = """
paper = "A paper"
stand_ins = "small networks"
answer = "It holds."

[defaults]
here = "Digits"

[shared.half]
epochs = 2
rows = { half = "random_backprop:keep=0.5" }
published = { half = "12.3" }

[shared.third]
rows = { third = "random_backprop:keep=0.3" }

[[artefacts]]
name = "one"
place = "table 1"
shows = "what half of the samples do"
claims_by_part = true
chart = { kind = "points", y = "accuracy" }
parts = [
    { name = "a", task = "digits", shared = ["half", "third"], rows = { all = "full" } },
    { name = "b", task = "digits", epochs = 3, shared = ["half"], scores = ["el2n", 3, 2] },
]

[[artefacts.claims]]
parts = "all"
text = "half gains"
measure = { function = "surplus", row = "half", over = "full" }

[[artefacts.claims]]
parts = ["a", "b"]
text = "half saves time"
says = "Table 1: it does"
measure = { function = "cpu_saved", row = "half", over = "full" }
above = 1
timed = true

[[artefacts]]
name = "two"
place = "figure 2"
shows = "two thirds"
here = "Letters"
parts = [{ name = "c", task = "letters", epochs = 1 }]
tables = { function = "time_tables" }
claims = [{ text = "it is", measure = { function = "cost_saved", row = "half", over = "full" } }]
"""


def run(metric):
    return {0: {"metric": {"value": metric}, "cpu_s": 2 * metric, "cost": {"ratio": metric}}}


def test_defaults_shared_rows_and_claims_part_by_part():
    found = parse_paper(TEXT, FUNCTIONS)
    one, two = found.artefacts
    assert (found.name, found.stand_ins) == ("A paper", "small networks")
    assert (one.paper, one.here, two.here) == ("A paper, table 1", "Digits", "Letters")
    a, b = one.parts
    assert list(a.rows) == ["half", "third", "all"] and (a.epochs, b.epochs) == (2, 3)
    assert a.published == b.published == {"half": "12.3"} and b.scores == ("el2n", 3, 2)
    assert one.chart is not None and one.chart.kind == "points" and one.tables is None
    assert [claim.text for claim in one.claims] == [
        "a: half gains",
        "a: half saves time",
        "b: half gains",
        "b: half saves time",
    ]
    assert [(claim.above, claim.timed) for claim in one.claims[:2]] == [(0, False), (1, True)]


def test_a_claim_gets_the_runs_of_its_part():
    one, two = parse_paper(TEXT, FUNCTIONS).artefacts
    measured = {
        "a": {"full": run(1.0), "half": run(0.75)},
        "b": {"full": run(1.0), "half": run(0.5)},
        "c": {"full": run(1.0), "half": run(0.25)},
    }
    assert [claim.value(measured, 0) for claim in one.claims] == [-0.25, 0.25, -0.5, 0.5]
    assert two.claims[0].value(measured, 0) == 0.75


@pytest.mark.parametrize(
    ("right", "wrong", "message"),
    [
        ("[defaults]", "[default]", "unexpected keyword argument 'default'"),
        ('here = "Letters"', 'hear = "Letters"', r"two: (?s:.*)hear\n  Unexpected"),
        ('place = "table 1"', "", "one: .*'place'"),
        ('shows = "two thirds"', "", r"two: (?s:.*)shows\n  .*required"),
        ("epochs = 3", "epoch = 3", r"one: (?s:.*)parts.1.epoch\n  Unexpected"),
        ("epochs = 3", 'epochs = "many"', r"one: (?s:.*)parts.1.epochs\n  .*integer"),
        ("above = 1", "abov = 1", r"one: (?s:.*)claims.1.abov\n  Unexpected"),
        ('kind = "points"', 'kind = "dots"', r"one: (?s:.*)chart.kind\n  .*'points'"),
        ('text = "half gains"', "", "one: .*'text'"),
        ('shared = ["half"]', 'shared = ["hal"]', r"one: `shared`: there is no \[shared.hal\]"),
        ('parts = ["a", "b"]', 'parts = ["d"]', "one: `parts`: no part 'd', there are a, b"),
        ('function = "surplus"', 'function = "gains"', "one: `measure`: no function 'gains' in .*"),
        ('function = "surplus", ', "", "one: .*'function'"),
        ('function = "surplus"', 'function = "math"', "one: `measure`: no function 'math'"),
        ('function = "time_tables"', 'function = "tables"', "two: `tables`: no function 'tables'"),
        ('row = "half", over = "full" } }]', 'row = "half" } }]', "two: .*cost_saved: .*'over'"),
        ('"surplus", row', '"surplus", raw', "one: `measure`: surplus: .*'row'"),
        ('"time_tables"', '"time_tables", a = 1', "two: `tables`: time_tables: .*'a'"),
    ],
)
def test_a_mistake_is_named_with_its_place(right, wrong, message):
    assert right in TEXT
    with pytest.raises(ValueError, match=rf"TOML file of .*selective_backprop: .*{message}"):
        parse_paper(TEXT.replace(right, wrong, 1), FUNCTIONS)


@pytest.mark.parametrize("module", [ada_selection, diet_sb, kakurenbo, selective_backprop])
def test_every_row_that_a_claim_names_is_trained(module):
    """A made-up run would tell, too, but not of a row that another part alone has."""
    stem = module.__name__.rpartition(".")[2]
    content = tomllib.loads((files("thresher_lab.reproduction") / f"{stem}.toml").read_text())
    for given, made in zip(content["artefacts"], read_paper(module).artefacts, strict=True):
        rows = {part.name: {"full", *part.rows} for part in made.parts}
        for claim in given["claims"]:
            measure = claim["measure"]
            named = set()
            for key in ("row", "rows", "over", "than", "method", "methods", "candidates"):
                given_rows = measure.get(key, ())
                named |= {given_rows} if isinstance(given_rows, str) else set(given_rows)
            if "method" in measure or "methods" in measure:
                named = {row_name(method, rate) for method in named for rate in RATES}
            for part in claim.get("parts", ()) if claim.get("parts") != "all" else rows:
                assert named <= rows[part], claim["text"]
