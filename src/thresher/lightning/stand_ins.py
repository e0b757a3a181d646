"""What stands in the place of a module's own attributes during a training, and is taken away afterwards."""

from typing import Any

from thresher.run.run import Run

_NOTHING = object()


class StandIns:
    """Attributes of objects that are replaced for a while.

    They are put into the `__dict__` of an object, where Python looks first. A child module of an `nn.Module` stays in its
    registry, so that `parameters`, `state_dict` and `train` go on as if nothing stood in its place.

    Example:
        >>> import torch
        >>> class Net(torch.nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.head = torch.nn.Linear(1, 2)
        >>> net, stand_ins = Net(), StandIns()
        >>> stand_ins.put(net, "head", "a stand-in")
        >>> net.head, list(net.state_dict())
        ('a stand-in', ['head.weight', 'head.bias'])
        >>> stand_ins.take_away()
        >>> net.head
        Linear(in_features=1, out_features=2, bias=True)
    """

    def __init__(self) -> None:
        self._put: list[tuple[dict[str, Any], str, Any, Any]] = []

    def put(self, owner: Any, name: str, value: Any) -> None:
        """Puts a value in the place of an attribute.

        Args:
            owner: Object that has the attribute.
            name: Name of the attribute.
            value: Value that stands in its place.
        """
        attributes = vars(owner)
        self._put.append((attributes, name, attributes.get(name, _NOTHING), value))
        attributes[name] = value

    def take_away(self) -> None:
        """Puts every attribute back as it was, except those that somebody else has set since."""
        while self._put:
            attributes, name, before, value = self._put.pop()
            if attributes.get(name, _NOTHING) is value:
                del attributes[name]
                if before is not _NOTHING:
                    attributes[name] = before


class CriterionInPlace:
    """The criterion of a run in the place of the module's own, whose attributes can be read as before.

    Args:
        own: Criterion of the module.
        run: Run that was attached with it.
    """

    def __init__(self, own: Any, run: Run) -> None:
        self._own, self._run = own, run

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the criterion of the run."""
        return self._run.criterion(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._own, name)
