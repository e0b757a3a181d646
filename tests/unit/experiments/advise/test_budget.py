import pytest

from thresher.experiments.advise import budget
from thresher.experiments.advise.budget import budget_advice, budget_sentences, smaller_losses


def planted(lost):
    """Returns a short run that loses so much with smaller batches, and differs by a hundredth between the seeds."""

    def metric(spec, seed):
        smaller = spec.attachment().get("spend") == "batches"
        return 0.9 + 0.01 * seed - (lost * spec.given["keep"] if smaller else 0.0)

    return metric


def test_losses_are_paired_by_seed_and_taken_with_smaller_batches():
    found = smaller_losses(planted(0.02), [0.5, 0.25])
    assert found["full"] == pytest.approx(0.905)
    assert [loss["share"] for loss in found["losses"]] == [0.5, 0.25]
    assert [loss["lost"] for loss in found["losses"]] == pytest.approx([0.01, 0.005])
    assert found["losses"][0]["by_seed"] == pytest.approx([0.01, 0.01])


@pytest.mark.parametrize(
    ("lost", "said"),
    [
        (
            0.003,
            "lose 0.30 points of accuracy in short runs of 5 epochs; the seeds differ by 0.00 points. Where that was up to 0.4",
        ),
        (0.008, "That is between what was free and what was not"),
        (0.02, "The training is not finished at this cost"),
        (-0.01, "smaller batches lose nothing in short runs"),
    ],
)
def test_what_is_said_of_a_share(lost, said):
    found = {"epochs": 5, "metric": "accuracy", **smaller_losses(planted(2 * lost), [0.5])}
    assert said in budget_sentences(found)[0]


def test_of_a_metric_that_is_no_share_no_limit_is_known():
    found = {"epochs": 5, "metric": "score", "full": 40.0, "losses": [{"share": 0.5, "lost": 3.0, "by_seed": [2.0, 4.0]}]}
    assert "lose 3.00 of score" in budget_sentences(found)[0] and "no limit is known" in budget_sentences(found)[0]


def test_short_runs_of_a_real_training(monkeypatch):
    monkeypatch.setattr(budget, "SEEDS", (0,))
    found = budget_advice("digits@200", [0.5], epochs=4)
    assert (found["epochs"], found["metric"]) == (2, "accuracy") and 0 < found["full"] < 1
    assert len(found["sentences"]) == 1


def test_a_share_with_too_few_rows_a_batch():
    with pytest.raises(ValueError, match="less than the two a batch that BatchNorm needs"):
        budget_advice("digits@200", [0.01], epochs=4)
