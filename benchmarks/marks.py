"""Parts of pages in Markdown that are written by commands: they stand between two lines that nobody sees."""


def between_marks(page: str, begin: str, end: str, text: str) -> str:
    """Returns a page with another text between two marks, which stay.

    Args:
        page: The page.
        begin: Mark before the text, such as "<!-- table -->"; the page has it once.
        end: Mark after the text; the page has it once, after `begin`.
        text: The text, without empty lines around it.

    Raises:
        ValueError: A mark is missing, or the page has one twice.
    """
    before, first, rest = page.partition(begin)
    _, last, after = rest.partition(end)
    if not (first and last) or begin in rest or end in before + after:
        raise ValueError(
            f"the page must have the marks {begin} and {end} once each, in this order; put them where the text is to be"
        )
    return f"{before}{begin}\n\n{text}\n\n{end}{after}"
