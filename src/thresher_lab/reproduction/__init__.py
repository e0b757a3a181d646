"""The tables and figures of the four papers by name, in the order of their modules."""

from thresher_lab.reproduction import ada_selection, diet_sb, kakurenbo, selective_backprop
from thresher_lab.reproduction.artefact import Artefact

ARTEFACTS = {
    found.name: found
    for module in (kakurenbo, selective_backprop, ada_selection, diet_sb)
    for found in vars(module).values()
    if isinstance(found, Artefact)
}
MINOR = ("kakurenbo-others", "kakurenbo-figure", "adaselection-pools", "diet-sb-runtime")
"""Beginnings of the names whose claims are not the main ones of their paper, with which its page begins."""
STAND_INS = {
    kakurenbo.PAPER: "small CNNs, a perceptron, ResNet-8, a U-Net and a small vision transformer, mostly on Fashion-MNIST",
    selective_backprop.PAPER: "a small CNN on 10,000 images of Fashion-MNIST",
    ada_selection.PAPER: "a small CNN on digits, MLPs on lines with outliers and on bike rentals, a transformer on a text",
    diet_sb.PAPER: "a small CNN and a perceptron on digits; beside controls of the same cost: [pruning](../methods/prune.md)",
}
"""What is trained in place of the models of each paper, in one line."""
