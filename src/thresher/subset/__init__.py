"""One forward pass of the whole batch, and a backward pass that costs only the rows that carry gradient.

`module` has the public functions, `settings` notices when a module changes, `tracing` and `assembly` make its graphs, `mixing`
verifies that its samples do not affect each other, `memory` lets operations work in place, `function` is the autograd function,
and `rows` selects rows of tensors.
"""

from thresher.subset.function import kept_rows as kept_rows
from thresher.subset.module import SubsetBackward as SubsetBackward
from thresher.subset.module import mixes_samples as mixes_samples
from thresher.subset.module import subset_backward as subset_backward
