"""The tables and figures of the four papers by name; one paper a file."""

from thresher.experiments.reproduction import ada_selection, diet_sb, kakurenbo, selective_backprop

ARTEFACTS = {
    artefact.name: artefact for paper in (kakurenbo, selective_backprop, ada_selection, diet_sb) for artefact in paper.ARTEFACTS
}
