"""Base class of objects that cannot be copied or pickled: a run belongs to one loop, its weak references to one process."""

from typing import Any, NoReturn


class Uncopied:
    """Base class of the parts of a run. Copying or pickling such an object raises TypeError before anything is copied."""

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            f"{type(self).__name__} cannot be copied or pickled: a run belongs to one training loop in one process. Save "
            "run.state_dict() and load it into a new run. copy.deepcopy(run.model) is a copy of your model alone."
        )
