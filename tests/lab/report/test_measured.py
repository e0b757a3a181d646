from thresher_lab.report.cards import NOT_MEASURED, measurements
from thresher_lab.training.store import write_json


def row(method, control_of=None, mean=0.9):
    more = {
        "std": 0.01,
        "difference": None,
        "ci95": None,
        "cost_ratio": 0.5,
        "cpu_ratio": 0.625,
        "verdict": "v",
    }
    return {"method": method, "control_of": control_of, "mean": mean} | more


def part(task, *methods):
    return {
        "name": "p",
        "task": task,
        "epochs": 20,
        "metric": "accuracy",
        "summary": [row("full"), *map(row, methods)],
    }


def reproduced(*parts, seeds=3):
    return {"seeds": list(range(seeds)), "device": "cpu", "parts": list(parts)}


def test_parts_of_tables_and_figures_are_quoted_each_once(tmp_path):
    write_json(
        tmp_path / "reproduce" / "a.json",
        reproduced(part("line", "big_loss:keep=0.1 twice"), part("bike", "div_bs")),
    )
    write_json(
        tmp_path / "reproduce" / "b.json", reproduced(part("line", "big_loss:keep=0.1 twice"))
    )
    write_json(
        tmp_path / "reproduce" / "c.json",
        reproduced(part("line", "big_loss:keep=0.1 twice"), seeds=5),
    )
    write_json(
        tmp_path / "reproduce" / "d.json",
        reproduced(part("line", "big_loss:keep=0.1 twice", "big_loss:keep=0.2")),
    )
    text = measurements("big_loss", tmp_path)
    assert "From `reproduce/a.json`" in text and "From `reproduce/b.json`" not in text
    assert (
        "### `line`, 20 epochs, 5 seeds, cpu" in text
        and "From `reproduce/d.json`" in text
        and "bike" not in text
    )
    assert "| `big_loss:keep=0.1 twice` | 90.00 ± 1.00 |" in text
    assert measurements("full", tmp_path) == NOT_MEASURED, "its page has the comparisons alone"
    assert (
        "`bike`" in measurements("div_bs", tmp_path)
        and measurements("seta", tmp_path) == NOT_MEASURED
    )


def test_a_metric_below_nothing_is_not_a_share(tmp_path):
    found = part("line", "seta")
    found["summary"][0] = row("full", mean=-0.5)
    write_json(tmp_path / "reproduce" / "a.json", reproduced(found))
    assert "|  | accuracy | difference" in measurements("seta", tmp_path)


def test_the_learning_rates_of_a_comparison_are_named(tmp_path):
    rows = [
        row(name) | {"rate": rate} for name, rate in (("full", 1.0), ("div_bs", 1.0), ("seta", 2.0))
    ]
    runs = [{"method": "full", "seed": 0, "metric": {"name": "accuracy", "value": 0.9}}]
    found = {"task": "line", "epochs": 3, "device": "cpu", "runs": runs, "summary": rows}
    write_json(
        tmp_path / "a.json",
        found | {"rates": {"factors": [0.5, 1.0, 2.0], "seeds": [10000, 10001]}},
    )
    text = measurements("seta", tmp_path)
    assert (
        "From `a.json`. Each method and control was tried at 0.5, 1 and 2 times the learning rate of the training"
        in text
    )
    assert (
        "uses the best: full 1; seta 2. The best rate is the smallest or largest tried for seta; a wider range"
        in text
    )
    write_json(tmp_path / "a.json", found)
    assert "From `a.json`.\n\n|" in measurements("seta", tmp_path)


def test_pairs_are_quoted_for_both_methods(tmp_path):
    pair = {
        "task": "bike",
        "method": "ada_selection:keep=0.1 twice",
        "mean": 73.25,
        "other": "random_backprop:keep=0.1 twice",
    }
    pair |= {"other_mean": 73.0, "difference": 0.25, "ci95": [-0.5, 1.0], "steps": 70, "seeds": 10}
    write_json(tmp_path / "pairs.json", {"pairs": [pair]})
    for name in ("ada_selection", "random_backprop"):
        text = measurements(name, tmp_path)
        assert text.startswith("### In pairs with as many optimizer steps\n\nFrom `pairs.json`")
        assert (
            "| `random_backprop:keep=0.1 twice` | 73.00 | +0.25 [-0.50, +1.00] | 70 | 10 |" in text
        )
    assert measurements("big_loss", tmp_path) == NOT_MEASURED


def test_a_league_is_quoted_with_its_verdicts(tmp_path):
    between = {"n": 5, "mean": -0.25, "low": -0.5, "high": 0.0, "finding": "unclear"}
    of_seta = {
        "task": "bike",
        "method": "seta",
        "metric": 92.5,
        "full": 93.0,
        "cost": 0.5,
        "to_full": between,
        "finding": "loses",
    }
    of_seta |= {"against": {"smaller": between | {"finding": "worse"}}}
    found = {"families": {}, "settings": {"seta": "seta:target=0.5"}, "rows": [of_seta]}
    found |= {"sentences": {"seta": "Better on none."}}
    write_json(tmp_path / "league.json", found)
    text = measurements("seta", tmp_path)
    assert "### One method a family, `seta:target=0.5`" in text and "From `league.json`" in text
    cells = "| `bike` | 92.50 | 93.00 | -0.25 [-0.50, +0.00], loses |  | -0.25 [-0.50, +0.00], worse |  | 0.500 | 5 |"
    assert cells in text and measurements("ies", tmp_path) == NOT_MEASURED
    assert "Better on none. From `league.json`" in text
