"""Samplers for any DataLoader: weighted, balanced, stratified, by length, shuffled; in several processes, with exact resume."""

from thresher.samplers.balanced import BalancedBatchSampler as BalancedBatchSampler
from thresher.samplers.epochs import BatchComposer as BatchComposer
from thresher.samplers.grouped import Grouped as Grouped
from thresher.samplers.mixture import Mixture as Mixture
from thresher.samplers.shuffle import Shuffle as Shuffle
from thresher.samplers.stratified import StratifiedBatchSampler as StratifiedBatchSampler
from thresher.samplers.stratified import labels_of as labels_of
from thresher.samplers.weighted import WeightedSampler as WeightedSampler
