"""Static scores: how hard each sample of a dataset is, computed once before training by models that were trained for this.

Larger is harder everywhere: `Prune(which="hard")` keeps the largest scores.
"""

from thresher.scores.disagreement import disagreement
from thresher.scores.el2n import el2n
from thresher.scores.forgetting import forgetting
from thresher.scores.grand import grand
from thresher.scores.irreducible import irreducible
from thresher.scores.memorisation import memorisation
from thresher.scores.prototypes import prototypes
from thresher.scores.runs import forgotten_in, from_run
from thresher.scores.table import Scores

__all__ = [
    "Scores",
    "disagreement",
    "el2n",
    "forgetting",
    "forgotten_in",
    "from_run",
    "grand",
    "irreducible",
    "memorisation",
    "prototypes",
]
