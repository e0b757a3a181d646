"""What the page on frozen modules quotes is what was measured."""

import json

from benchmarks import cached


def test_the_page_is_that_of_the_results():
    found = cached.results(cached.load())
    assert found["tasks"].keys() == cached.TASKS.keys()
    assert json.loads(json.dumps(found)) == json.loads(cached.RESULTS.read_text())
    assert cached.table(found) in cached.PAGE.read_text()


def test_cached_trainings_have_the_losses_of_plain_ones():
    plain = cached.train("dpo", "plain", 0, 1)
    same = cached.train("dpo", "cached", 0, 1)
    assert plain["losses"] == same["losses"] and same["bytes"] > 0
