"""One forward pass of the whole batch, and a backward pass that costs only the rows that carry gradient.

`module` has the public function, and `trace_key` shows when a module has changed. `making` makes its graphs, and lets
operations work in place: `tracing` traces the module, `assembly` assembles the `graphs`, `mixing` verifies that its samples do
not affect each other, `inductor` compiles, and `verify` compares the graphs with the module. `function` is the autograd
function. `compilers` finds the module inside a model that torch.compile has compiled.
"""

from thresher.subset.function import kept_rows as kept_rows
from thresher.subset.module import SubsetBackward as SubsetBackward
from thresher.subset.module import mixes_samples as mixes_samples
from thresher.subset.module import subset_backward as subset_backward
