# The public names of thresher, each in one line. `__init__.py` reads these lines to know where a name comes from, so that
# nothing is imported before it is used; type checkers read them as they are.

from thresher import cost as cost
from thresher import lightning as lightning
from thresher import losses as losses
from thresher import methods as methods
from thresher import plans as plans
from thresher import records as records
from thresher import rl as rl
from thresher import rng as rng
from thresher import samplers as samplers
from thresher import schedules as schedules
from thresher import scores as scores
from thresher import selection as selection
from thresher import sheet as sheet
from thresher import testing as testing
from thresher import transformers as transformers
from thresher import trl as trl
from thresher.attribution import AttributionError as AttributionError
from thresher.cost import break_even as break_even
from thresher.frozen import cached as cached
from thresher.loading.samplers import ShardedSampler as ShardedSampler
from thresher.loading.settings import loader_settings as loader_settings
from thresher.loading.smaller_batches import SmallerBatchesError as SmallerBatchesError
from thresher.loading.tensor_loader import TensorLoader as TensorLoader
from thresher.methods import Requirements as Requirements
from thresher.methods.built_in import *  # noqa: F403
from thresher.methods.prune import keep_in_batch as keep_in_batch
from thresher.methods.token_selection import TokenSelection as TokenSelection
from thresher.observation import DataMap as DataMap
from thresher.passes.scoring_settings import Scoring as Scoring
from thresher.plans import BatchPlan as BatchPlan
from thresher.plans import EpochPlan as EpochPlan
from thresher.records import Column as Column
from thresher.run import Run as Run
from thresher.run import attach as attach
from thresher.run import observe as observe
from thresher.run.learning_rate import ProgressLR as ProgressLR
from thresher.samplers import Shuffle as Shuffle
from thresher.samplers import StratifiedBatchSampler as StratifiedBatchSampler
from thresher.samplers import labels_of as labels_of
from thresher.subset import mixes_samples as mixes_samples
from thresher.subset import subset_backward as subset_backward
from thresher.trees import to_device as to_device

__version__: str
__all__: list[str]
