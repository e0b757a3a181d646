"""Wrong labels by people: how the labels are read, how scores are judged, and what changes `suspicion`."""

import io
import sys
import tarfile

import numpy as np
import pytest
import torch
from benchmarks import people


def study(texts, ratings):
    """Returns the files of the ratings, packed twice as in the distribution of vaderSentiment."""

    def packed(files):
        out = io.BytesIO()
        with tarfile.open(fileobj=out, mode="w:gz") as archive:
            for name, content in files.items():
                member = tarfile.TarInfo(name)
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))
        return out.getvalue()

    files = {}
    for domain in people.TEXT_DOMAINS:
        rows = [f"{i}\t0.1\t{text}" for i, text in enumerate(texts)]
        files[f"hutto_ICWSM_2014/{domain}_GroundTruth.txt"] = "\n".join(rows).encode()
        rows = [f"{i}\t0.1\t0.2\t{of}" for i, of in enumerate(ratings)]
        files[f"hutto_ICWSM_2014/{domain}_anonDataRatings.txt"] = "\n".join(rows).encode()
    name = "vaderSentiment-3.3.2/additional_resources/hutto_ICWSM_2014.tar.gz"
    return packed({name: packed(files)})


def test_the_right_label_of_a_text_is_the_most_frequent_sign(tmp_path):
    path = tmp_path / "ratings.tar.gz"
    path.write_bytes(study(["good good film", "no"], [[1, 3, 2], [-1, -2, 0]]))
    first, again, other = (people.ratings(path, seed) for seed in (0, 0, 1))
    together = torch.cat((first.right, first.test_labels))
    assert len(together) == 8 and sorted(together.tolist()) == [0] * 4 + [2] * 4
    assert torch.equal(first.labels, again.labels) and torch.equal(first.right, other.right)
    assert (first.labels[first.right == 2] == 2).all()
    assert set(first.labels[first.right == 0].tolist()) <= {0, 1}


def test_words_and_pairs_of_words_are_hashed():
    numbers = people.hashed_words("Good good film")
    assert len(numbers) == people.WORDS and numbers[0] == numbers[1]
    assert np.count_nonzero(numbers) == 5 and max(numbers) < people.VOCABULARY


def test_scores_are_judged_by_all_and_by_the_first():
    wrong = np.arange(400) % 4 == 0
    assert people.judged(wrong.astype(float), wrong) == {"auroc": 1, "first": 1, "precision": 1}
    assert people.judged(-wrong.astype(float), wrong)["precision"] == 0


def test_the_networks_fit_their_inputs():
    assert people.image_network()(torch.randn(2, 3, 32, 32)).shape == (2, 10)
    assert people.Text()(torch.tensor([[3, 4, 0], [0, 0, 0]])).shape == (2, 3)


def test_aum_takes_the_place_of_suspicion_only_if_it_is_ahead_on_three(monkeypatch):
    def end(aum):
        return {"end": {"suspicion": {"auroc": 0.8}, "aum": {"auroc": aum}}}

    def verdict(texts, first, worst):
        done = {
            people.Job("texts, one rater", 0): end(texts),
            people.Job("CIFAR-10, random1", 0): end(first),
            people.Job("CIFAR-10, worst", 0): end(worst),
        }
        planted = {people.observe.Job("digits", "10 %", 0): end(0.81)["end"]}
        return people.suspicion_becomes_aum(people.change_of_suspicion(done, planted))

    assert verdict(0.795, 0.81, 0.81)
    assert not verdict(0.78, 0.81, 0.81)
    assert not verdict(0.795, 0.79, 0.81)


@pytest.mark.parametrize(
    ("given", "message"), [([], "--cifar must be"), (["--cifar", "."], "--ratings must be")]
)
def test_missing_data_is_an_error_that_says_how_to_get_it(
    given, message, tmp_path, monkeypatch, capsys
):
    (tmp_path / "labels.csv").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["people", "--runs", str(tmp_path / "runs.jsonl"), *given])
    with pytest.raises(SystemExit):
        people.main()
    assert message in capsys.readouterr().err


def test_the_page_has_the_tables_of_the_committed_trainings(tmp_path):
    done = people.load(people.RUNS)
    assert set(done) == set(people.planned())
    text = people.text(done, people.observe.load(people.observe.RUNS))
    assert text in people.PAGE.read_text()
    assert "So `suspicion` does not become `aum`" in text
