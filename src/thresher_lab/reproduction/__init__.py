"""The tables and figures of the four papers by name, in the order of their modules."""

from thresher_lab.reproduction import ada_selection, diet_sb, kakurenbo, selective_backprop
from thresher_lab.reproduction.artefact import Artefact

ARTEFACTS = {
    found.name: found
    for module in (kakurenbo, selective_backprop, ada_selection, diet_sb)
    for found in vars(module).values()
    if isinstance(found, Artefact)
}
