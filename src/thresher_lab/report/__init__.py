"""Turns the results of a comparison into one self-contained HTML page, and the facts about methods into cards."""
