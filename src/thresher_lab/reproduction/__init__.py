"""The tables and figures of the four papers by name."""

from thresher_lab.reproduction.ada_selection import ADA_SELECTION_ARTEFACTS
from thresher_lab.reproduction.diet_sb import DIET_SB_ARTEFACTS
from thresher_lab.reproduction.kakurenbo import KAKURENBO_INSIDE_FIGURES, KAKURENBO_RELIEF_FIGURES, KAKURENBO_TABLES
from thresher_lab.reproduction.selective_backprop import SELECTIVE_BACKPROP_ARTEFACTS

ARTEFACTS = {
    artefact.name: artefact
    for artefact in (
        *KAKURENBO_TABLES,
        *KAKURENBO_INSIDE_FIGURES,
        *KAKURENBO_RELIEF_FIGURES,
        *SELECTIVE_BACKPROP_ARTEFACTS,
        *ADA_SELECTION_ARTEFACTS,
        *DIET_SB_ARTEFACTS,
    )
}
