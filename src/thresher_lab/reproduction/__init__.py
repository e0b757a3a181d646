"""The tables and figures of the four papers by name, in the order of their modules."""

from thresher_lab.reproduction import ada_selection, diet_sb, kakurenbo, selective_backprop
from thresher_lab.reproduction.artefact import Artefact
from thresher_lab.reproduction.declarations import read_paper

KAKURENBO = read_paper(kakurenbo)
ADA_SELECTION = read_paper(ada_selection)
SELECTIVE_BACKPROP = read_paper(selective_backprop)
ARTEFACTS = {
    found.name: found
    for several in (
        KAKURENBO.artefacts,
        SELECTIVE_BACKPROP.artefacts,
        ADA_SELECTION.artefacts,
        vars(diet_sb).values(),
    )
    for found in several
    if isinstance(found, Artefact)
}
MINOR = ("kakurenbo-others", "kakurenbo-figure", "adaselection-pools", "diet-sb-runtime")
"""Beginnings of the names whose claims are not the main ones of their paper, with which its page begins."""
STAND_INS = {
    KAKURENBO.name: KAKURENBO.stand_ins,
    SELECTIVE_BACKPROP.name: SELECTIVE_BACKPROP.stand_ins,
    ADA_SELECTION.name: ADA_SELECTION.stand_ins,
    diet_sb.PAPER: "a small CNN and a perceptron on digits; beside controls of the same cost: [pruning](../methods/prune.md)",
}
"""What is trained in place of the models of each paper, in one line."""
