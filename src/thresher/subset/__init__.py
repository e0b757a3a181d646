"""One forward pass of the whole batch, and a backward pass that costs only the rows that carry gradient.

`module` has the public function, and `settings` notices when a module changes. `making` makes its graphs: `tracing` and
`assembly` trace it, `mixing` verifies that its samples do not affect each other, `memory` lets operations work in place,
`inductor` compiles, and `agreement` verifies what was compiled. `function` is the autograd function, and `rows` selects rows.
"""

from thresher.subset.function import kept_rows as kept_rows
from thresher.subset.module import SubsetBackward as SubsetBackward
from thresher.subset.module import mixes_samples as mixes_samples
from thresher.subset.module import subset_backward as subset_backward
