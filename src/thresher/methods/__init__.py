"""The methods, one per file. `built_in` has one line per method, so methods can be listed without importing them or torch."""

from thresher.methods.contract import BatchMethod as BatchMethod
from thresher.methods.contract import BeforeMethod as BeforeMethod
from thresher.methods.contract import Card as Card
from thresher.methods.contract import EpochMethod as EpochMethod
from thresher.methods.contract import Method as Method
from thresher.methods.contract import Requirements as Requirements
from thresher.methods.contract import State as State
from thresher.methods.contract import defines as defines
from thresher.methods.contract import requirements_of as requirements_of
from thresher.methods.registry import BUILT_IN as BUILT_IN
from thresher.methods.registry import FOR_POSITIONS as FOR_POSITIONS
from thresher.methods.registry import GROUP as GROUP
from thresher.methods.registry import MethodInfo as MethodInfo
from thresher.methods.registry import create as create
from thresher.methods.registry import infos as infos
from thresher.methods.registry import load as load
from thresher.methods.registry import name_of as name_of
from thresher.methods.registry import names as names
from thresher.methods.registry import nearest_name as nearest_name
from thresher.methods.registry import no_such as no_such
from thresher.methods.text import parse as parse
from thresher.methods.text import split_outside_brackets as split_outside_brackets
from thresher.methods.text import validate_settings as validate_settings
