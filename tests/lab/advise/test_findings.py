import pytest

from thresher_lab.advise import findings
from thresher_lab.advise.findings import Measurement, Record, all_measurements, record_of
from thresher_lab.training.specs import parse_methods


def measured(task, to_full="unclear", **against):
    return Measurement("here", task, "infobatch", 0.7, -1.0, to_full, against)


@pytest.mark.parametrize(
    ("against", "sign"),
    [
        ({"uniform": "better", "placebo": "unclear"}, 1),
        ({"uniform": "better", "shorter": "worse"}, 0),
        ({"uniform": "no better", "shorter": "worse"}, -1),
        ({"uniform": "unclear", "placebo": "no better"}, 0),
    ],
)
def test_a_measurement_is_for_or_against_a_method(against, sign):
    assert measured("a", **against).sign == sign


def test_where_a_method_stood():
    good, bad = measured("a", uniform="better"), measured("b", "loses", uniform="worse")
    assert Record([]).standing == "not measured" and Record([measured("c")]).standing == "undecided"
    assert Record([good, bad]).standing == "undecided"
    found = Record([good, bad, measured("d", smaller="better"), measured("d")])
    assert found.as_dict() == {
        "standing": "ahead",
        "other_settings": False,
        "on": ["a", "b", "d"],
        "better_on": ["a", "d"],
        "worse_on": ["b"],
        "lost_on": ["b"],
        "below_on": [],
        "under_zero_on": [],
        "interval_on": [],
    }
    assert Record([bad, bad]).standing == "behind"


def test_methods_are_found_by_the_way_they_compute(monkeypatch):
    labels = ("selective_backprop:keep=0.33 once", "selective_backprop:keep=0.33 twice", "kakurenbo", "infobatch in batches")
    rows = tuple(Measurement("here", label, label, 0.5, 0.0, "unclear", {}) for label in labels)
    monkeypatch.setattr(findings, "all_measurements", lambda: rows)

    def tasks(text, **given):
        return record_of(parse_methods(text)[0], **given).tasks()

    assert tasks("selective_backprop:keep=0.2:forward_passes=once") == [labels[0]]
    assert record_of(parse_methods("selective_backprop:keep=0.2:forward_passes=once")[0]).other_settings
    assert tasks("selective_backprop:keep=0.2") == [labels[0]]
    assert tasks("selective_backprop:keep=0.2", traced=False) == [labels[1]]
    assert tasks("selective_backprop:keep=0.2:forward_passes=twice") == [labels[1]]
    assert tasks("kakurenbo:tau=0.5") == ["kakurenbo"] and tasks("kakurenbo", traced=False) == ["kakurenbo"]
    assert tasks("infobatch:spend=batches") == ["infobatch in batches"] and tasks("infobatch") == []
    assert tasks("uniform:keep=0.5+random_backprop") == []


def test_the_same_settings_come_before_others(monkeypatch):
    rows = tuple(
        Measurement("here", f"at {share}", f"winnow:share={share}", share, 0.0, "unclear", {}) for share in (0.35, 0.5)
    )
    monkeypatch.setattr(findings, "all_measurements", lambda: rows)
    [half, third] = (record_of(spec) for spec in parse_methods("winnow:share=0.5,winnow:share=0.3"))
    assert (half.tasks(), half.other_settings) == (["at 0.5"], False)
    assert (third.tasks(), third.other_settings) == (["at 0.35", "at 0.5"], True)
    assert not record_of(parse_methods("infobatch")[0]).other_settings


def test_what_was_measured_has_findings_that_are_known():
    assert len(all_measurements()) > 20
    for one in all_measurements():
        assert one.to_full in ("no loss", "loses", "unclear") and 0 < one.cost <= 1
        assert set(one.against.values()) <= {"better", "worse", "no better", "unclear"}
