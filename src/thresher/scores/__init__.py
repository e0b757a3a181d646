"""Static scores: how hard each sample of a dataset is, computed once before training by models that were trained for this.

Larger is harder everywhere: `Prune(which="hard")` keeps the largest scores.
"""

from thresher.score_table import Scores
from thresher.scores._common import class_probabilities, sample_features
from thresher.scores.aum import aum
from thresher.scores.d2 import d2
from thresher.scores.disagreement import disagreement
from thresher.scores.dual import dual
from thresher.scores.dyn_unc import dyn_unc
from thresher.scores.el2n import el2n
from thresher.scores.forgetting import forgetting
from thresher.scores.grand import grand
from thresher.scores.irreducible import irreducible
from thresher.scores.memorisation import memorisation
from thresher.scores.prototypes import prototypes
from thresher.scores.runs import forgotten_in, from_run
from thresher.scores.tdds import tdds

__all__ = [
    "Scores",
    "aum",
    "class_probabilities",
    "d2",
    "disagreement",
    "dual",
    "dyn_unc",
    "el2n",
    "forgetting",
    "forgotten_in",
    "from_run",
    "grand",
    "irreducible",
    "memorisation",
    "prototypes",
    "sample_features",
    "tdds",
]
