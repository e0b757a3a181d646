"""Tools for authors of methods: a check of every promise of a method, and problems on which it should beat random samples."""

from thresher.audit import Audit as Audit
from thresher.audit import audit as audit
from thresher.testing.check import ContractError as ContractError
from thresher.testing.check import check_method as check_method
from thresher.testing.policy import check_policy as check_policy
from thresher.testing.toys import Toy as Toy
from thresher.testing.toys import beats_uniform as beats_uniform
from thresher.testing.toys import planted as planted
