"""One forward of the whole batch, a backward pass that costs only the rows that carry gradient.

`module` is what users call; `graphs` traces a module, `mixing` finds out whether its samples are on their own and tries the
graphs out, `function` is the autograd function, `rows` takes rows of tensors.
"""

from thresher.subset.function import kept_rows as kept_rows
from thresher.subset.module import SubsetBackward as SubsetBackward
from thresher.subset.module import mixes_samples as mixes_samples
from thresher.subset.module import subset_backward as subset_backward
