"""The methods of this package, one line per method: this list is the registry.

The name of a method is the name of its module. `thresher.methods.registry` and `thresher` read these lines without running
them, so listing the methods does not import torch. Type checkers read them, too.
"""

from thresher.methods.ada_boost import AdaBoost as AdaBoost
from thresher.methods.ada_selection import AdaSelection as AdaSelection
from thresher.methods.batch_importance import BatchImportance as BatchImportance
from thresher.methods.big_loss import BigLoss as BigLoss
from thresher.methods.ccs import Ccs as Ccs
from thresher.methods.coreset_center import CoresetCenter as CoresetCenter
from thresher.methods.coreset_extremes import CoresetExtremes as CoresetExtremes
from thresher.methods.div_bs import DivBS as DivBS
from thresher.methods.epoch_selective_backprop import EpochSelectiveBackprop as EpochSelectiveBackprop  # fmt: skip
from thresher.methods.forgetting import Forgetting as Forgetting
from thresher.methods.full import FullData as FullData
from thresher.methods.grad_match import GradMatch as GradMatch
from thresher.methods.gradient_norm import GradientNorm as GradientNorm
from thresher.methods.ies import Ies as Ies
from thresher.methods.importance_sampling import ImportanceSampling as ImportanceSampling
from thresher.methods.infobatch import InfoBatch as InfoBatch
from thresher.methods.kakurenbo import Kakurenbo as Kakurenbo
from thresher.methods.order_dp import OrderDp as OrderDp
from thresher.methods.prune import Prune as Prune
from thresher.methods.random_backprop import RandomBackprop as RandomBackprop
from thresher.methods.rcap import Rcap as Rcap
from thresher.methods.repb import RePb as RePb
from thresher.methods.rho_loss import RhoLoss as RhoLoss
from thresher.methods.rs2 import Rs2 as Rs2
from thresher.methods.selective_backprop import SelectiveBackprop as SelectiveBackprop
from thresher.methods.seta import SeTa as SeTa
from thresher.methods.small_loss import SmallLoss as SmallLoss
from thresher.methods.threshold_keep import ThresholdKeep as ThresholdKeep
from thresher.methods.ucb import Ucb as Ucb
from thresher.methods.uniform import UniformSubset as UniformSubset
from thresher.methods.uniform_rows import UniformRows as UniformRows
from thresher.methods.winnow import Winnow as Winnow
