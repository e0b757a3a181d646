"""One forward pass over the whole batch, and a backward pass over only the rows of the batch that have a gradient.

`module` has the public function `subset_backward`. `making` builds the graphs of a module: `tracing` traces the module,
`assembly` describes the arguments and results of the `graphs`, `mixing` verifies that samples do not affect each other,
`inductor` compiles, `verify` compares the graphs with the module, and `simplify` shortens them. `function` is the autograd
function that runs the graphs. `trace_key` detects changes of a module since it was traced, and `side_effects` undoes changes
that an extra forward pass makes. `compilers` finds the module inside a model that torch.compile has compiled.
"""

from thresher.subset.function import kept_rows as kept_rows
from thresher.subset.module import SubsetBackward as SubsetBackward
from thresher.subset.module import mixes_samples as mixes_samples
from thresher.subset.module import subset_backward as subset_backward
