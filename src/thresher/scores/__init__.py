"""Static scores: how hard each sample of a dataset is, computed once before training, by models trained for this purpose.

Larger is harder everywhere: `Prune(which="hard")` keeps the largest scores.
"""

from thresher.score_table import Scores as Scores
from thresher.scores._common import class_probabilities as class_probabilities
from thresher.scores._common import sample_features as sample_features
from thresher.scores.aum import aum as aum
from thresher.scores.d2 import d2 as d2
from thresher.scores.disagreement import disagreement as disagreement
from thresher.scores.dual import dual as dual
from thresher.scores.dyn_unc import dyn_unc as dyn_unc
from thresher.scores.el2n import el2n as el2n
from thresher.scores.forgetting import forgetting as forgetting
from thresher.scores.grand import grand as grand
from thresher.scores.irreducible import irreducible as irreducible
from thresher.scores.memorisation import memorisation as memorisation
from thresher.scores.prototypes import prototypes as prototypes
from thresher.scores.runs import forgotten_in as forgotten_in
from thresher.scores.runs import from_run as from_run
from thresher.scores.tdds import tdds as tdds
