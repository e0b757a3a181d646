"""The tables and figures of the four papers by name, in the order of their modules."""

from thresher_lab.reproduction import ada_selection, diet_sb, kakurenbo, selective_backprop
from thresher_lab.reproduction.declarations import read_paper

PAPERS = [read_paper(module) for module in (kakurenbo, selective_backprop, ada_selection, diet_sb)]
ARTEFACTS = {artefact.name: artefact for paper in PAPERS for artefact in paper.artefacts}
MINOR = (
    "kakurenbo-others",
    "kakurenbo-figure",
    "adaselection-pools",
    "adaselection-weights",
    "diet-sb-runtime",
)
"""Beginnings of the names whose claims are not the main ones of their paper, with which its page begins."""
STAND_INS = {paper.name: paper.stand_ins for paper in PAPERS}
"""What is trained in place of the models of each paper, in one line."""
ANSWERS = {paper.name: paper.answer for paper in PAPERS}
"""Whether what each paper is about holds, in one sentence."""
UNJUDGED = {paper.name: paper.unjudged for paper in PAPERS}
"""The sentences of each paper that no claim judges, and why."""
PAPER_SETTINGS = {paper.name: (paper.settings_from, paper.settings) for paper in PAPERS}
"""The sources of the settings of each paper, and the rows of its table of settings."""
