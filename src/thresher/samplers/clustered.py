"""`ClusteredBatchSampler`: batches from one cluster each, for losses that compare the rows of a batch."""

import zlib
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from thresher.samplers.epochs import BatchComposer, permute_batches
from thresher.samplers.stratified import codes_of


class ClusteredBatchSampler(BatchComposer):
    """Sampler of batches whose samples are from one cluster, such as similar texts or one domain.

    Use it as `DataLoader(dataset, batch_sampler=ClusteredBatchSampler(clusters, 64))`. Every sample comes once per epoch. In
    each epoch, a cluster is divided into full batches at random. The rows left over from all clusters fill further batches,
    ordered by cluster. All batches come in random order.

    A loss with in-batch negatives, such as MultipleNegativesRankingLoss, then compares similar samples, which are harder to
    tell apart than random ones (https://arxiv.org/abs/2505.11293).

    With W processes, each process gets every W-th batch; if the number of batches is not divisible by W, the first batches come
    again.

    Args:
        clusters: Cluster of each sample: list, array or tensor of numbers or strings, shape (N,), as from `clusters_of`.
        batch_size: Number of rows of a batch, 1 or more.
        seed: Random seed. Default: 0.
        num_replicas: Number of processes that share the batches. Default: the world size of torch.distributed if it is
            initialized, else 1. Pass num_replicas=1, rank=0 if other code divides the data among processes, such as
            `accelerator.prepare`.
        rank: Number of this process, within [0, num_replicas). Default: the rank in torch.distributed, or 0.
        drop_last: Whether to leave out a batch that is not full, and the last batches if the processes cannot get equally many.
            Default: False.

    Attributes:
        epoch: Number of the next epoch, which the next loop over the sampler yields.

    Raises:
        TypeError: `seed` or `batch_size` is not an integer.
        ValueError: `batch_size` is below 1, `clusters` are no classes, or `num_replicas` and `rank` do not fit together.

    Example:
        >>> clusters = np.array([0, 1, 0, 1, 0, 1, 0, 1])
        >>> [len({*clusters[batch].tolist()}) for batch in ClusteredBatchSampler(clusters, 2)]
        [1, 1, 1, 1]
    """

    def __init__(
        self,
        clusters: ArrayLike | Tensor,
        batch_size: int,
        *,
        seed: int = 0,
        num_replicas: int | None = None,
        rank: int | None = None,
        drop_last: bool = False,
    ) -> None:
        super().__init__(seed, num_replicas, rank, drop_last, batch_size=batch_size)
        self.codes = codes_of(clusters)
        self._rows_per_item = batch_size

    @property
    def samples(self) -> int:
        """Number of samples of the dataset."""
        return len(self.codes)

    def compose(
        self, ids: NDArray[np.int64], epoch: int, batches: int | None = None
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Returns the batches of an epoch; see `BatchComposer.compose`."""
        generator = np.random.default_rng((self.seed, epoch, 4))
        # Clusters in random order, and in each of them its samples.
        places = generator.permutation(int(self.codes.max()) + 1)
        rows = generator.permutation(ids)
        rows = rows[np.argsort(places[self.codes[rows]], kind="stable")]
        if batches is None:
            rows = self._full_batches_first(rows)
        ends = self._cut_rows(len(rows), batches)
        return permute_batches(rows, ends, generator.permutation(len(ends) - 1))

    def _full_batches_first(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns rows with the full batches of all clusters first."""
        size = self._rows_per_item
        codes = self.codes[rows]
        begins = np.flatnonzero(np.append(True, codes[1:] != codes[:-1]))
        counts = np.diff(np.append(begins, len(rows)))
        place = np.arange(len(rows)) - np.repeat(begins, counts)
        whole = place < np.repeat(counts // size * size, counts)
        return np.concatenate([rows[whole], rows[~whole]])

    def settings(self) -> dict[str, Any]:
        """Returns the settings that determine the order, as plain values; for the clusters a checksum."""
        return super().settings() | {"clusters": zlib.crc32(np.ascontiguousarray(self.codes).data)}


def clusters_of(embeddings: ArrayLike | Tensor, k: int, seed: int = 0) -> NDArray[np.int64]:
    """Returns the cluster of each sample, by k-means on its embedding, with scikit-learn's MiniBatchKMeans.

    Args:
        embeddings: Embeddings, shape (N, features), such as those of the model before fine-tuning.
        k: Number of clusters, 1 to N. A few batches per cluster are enough: N / (10 * batch_size), for example.
        seed: Random seed. Default: 0.

    Returns:
        Clusters, shape (N,), int64, from 0 on.

    Raises:
        ImportError: scikit-learn is not installed; the extra `lab` has it.
        ValueError: `embeddings` do not have two dimensions, or `k` is out of its range.

    Example:
        >>> points = np.array([[0.0, 0.1], [0.1, 0.0], [5.0, 5.1], [5.1, 5.0]])
        >>> first, second, third, fourth = clusters_of(points, 2).tolist()
        >>> first == second != third == fourth
        True
    """
    if isinstance(embeddings, Tensor):
        embeddings = embeddings.detach().float().cpu().numpy()
    values = np.asarray(embeddings, dtype=np.float32)
    if values.ndim != 2 or not 1 <= k <= len(values):
        raise ValueError(
            f"clusters_of: `embeddings` must have shape (N, features) and `k` be within [1, N], got shape {values.shape} and {k}"
        )
    try:
        from sklearn.cluster import MiniBatchKMeans
    except ImportError:
        raise ImportError("clusters_of needs scikit-learn: pip install 'thresher[lab]'") from None
    means = MiniBatchKMeans(k, random_state=seed, batch_size=max(1024, 4 * k))
    return means.fit_predict(values).astype(np.int64)
