import collections
import dataclasses

import torch
from torch import Tensor

from thresher.trees import leaves, map_leaves, to_device

A, B, C = torch.tensor([1.0]), torch.tensor([2.0]), torch.tensor([3.0])
Pair = collections.namedtuple("Pair", "x y")


@dataclasses.dataclass(frozen=True)
class Output:
    logits: Tensor
    note: str = "kept"


class OwnList(list):
    pass


TREE = {
    "b": [A, (B, "text"), None],
    "a": Pair(x=C, y=4),
    "o": Output(A),
    "c": collections.OrderedDict(z=B),
    "l": OwnList([C]),
    "class": Output,
    "nothing": (),
}


def test_leaves_in_order() -> None:
    assert [id(leaf) for leaf in leaves(TREE)] == [id(leaf) for leaf in (A, B, C, A, B, C)]
    assert list(leaves(A)) == [A]
    assert list(leaves("text")) == list(leaves(7)) == list(leaves({})) == []


def test_a_mapped_tree_has_the_same_types_and_leaves_the_original_alone() -> None:
    mapped = map_leaves(lambda leaf: leaf * 10, TREE)
    assert [leaf.item() for leaf in leaves(mapped)] == [10, 20, 30, 10, 20, 30]
    assert [leaf.item() for leaf in leaves(TREE)] == [1, 2, 3, 1, 2, 3]
    assert list(mapped) == list(TREE)
    assert type(mapped["a"]) is Pair and mapped["a"].y == 4
    assert type(mapped["o"]) is Output and mapped["o"].note == "kept"
    assert type(mapped["c"]) is collections.OrderedDict and type(mapped["l"]) is OwnList
    assert type(mapped["b"]) is list and type(mapped["b"][1]) is tuple
    assert mapped["b"][1][1] == "text" and mapped["b"][2] is None
    assert mapped["class"] is Output and mapped["nothing"] == ()


def test_a_batch_that_is_there_already_is_the_same_object() -> None:
    assert to_device(TREE, torch.device("cpu")) is TREE
    assert to_device("text", torch.device("cpu")) == "text"


def test_a_batch_is_moved_where_one_tensor_is_elsewhere() -> None:
    moved = to_device({"x": A, "y": (B, "text")}, torch.device("meta"))
    assert moved["x"].device.type == moved["y"][0].device.type == "meta"
    assert moved["y"][1] == "text"
    mixed = {"x": A.to("meta"), "y": B}
    assert to_device(mixed, torch.device("meta"))["y"].device.type == "meta"


class Boxes:
    """A batch object as detection code has it: tensors and lists in attributes, and objects that know each other."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.deep, self.name = x, {"y": [y]}, "boxes"
        self.owner = self
        self.items = [self]
        self.net = torch.nn.Linear(1, 1)


def test_objects_with_attributes() -> None:
    boxes = Boxes(A, B)
    assert [id(leaf) for leaf in leaves([boxes, C])] == [id(leaf) for leaf in (A, B, C)]
    mapped = map_leaves(lambda leaf: leaf * 10, boxes)
    assert (
        type(mapped) is Boxes
        and mapped.name == "boxes"
        and mapped.net is boxes.net
        and mapped.owner is boxes
    )
    assert [leaf.item() for leaf in leaves(mapped)] == [10, 20]
    assert [leaf.item() for leaf in leaves(boxes)] == [1, 2]


def test_objects_without_tensors_stay_the_same_object() -> None:
    net, plain = torch.nn.Linear(1, 1), type("Plain", (), {})()
    plain.number = 3
    assert list(leaves([net, plain, leaves, dataclasses])) == []
    assert map_leaves(lambda leaf: leaf * 10, (net, plain, leaves, dataclasses)) == (
        net,
        plain,
        leaves,
        dataclasses,
    )
