import pytest
from benchmarks.marks import between_marks


def test_the_text_between_the_marks_is_replaced() -> None:
    page = between_marks("a\n<b>\nold\n<e>\nc\n", "<b>", "<e>", "new")
    assert page == "a\n<b>\n\nnew\n\n<e>\nc\n"
    assert between_marks(page, "<b>", "<e>", "new") == page


@pytest.mark.parametrize(
    "page", ["", "<b>", "<e>", "<e><b>", "<b><b><e>", "<b><e><e>", "<e><b><e>"]
)
def test_a_page_has_each_mark_once(page: str) -> None:
    with pytest.raises(
        ValueError, match="the page must have the marks <b> and <e> once each, in this order"
    ):
        between_marks(page, "<b>", "<e>", "new")
