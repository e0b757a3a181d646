"""For authors of methods: check that a method keeps its promises, and that it wins where it should."""

from thresher.testing.check import check_method as check_method
from thresher.testing.subjects import ContractError as ContractError
from thresher.testing.toys import Toy as Toy
from thresher.testing.toys import beats_uniform as beats_uniform
from thresher.testing.toys import planted as planted

__all__ = ["ContractError", "Toy", "beats_uniform", "check_method", "planted"]
