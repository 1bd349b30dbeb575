"""Facts and formulas: what KV weighs, what a step and a transfer take, and when restoring beats computing.

Pure and deterministic: no clock, no I/O beyond the catalog files of the package. The names below are the public ones.
"""

from kvhearth.cost.catalog import find_gpu, find_link, find_model
from kvhearth.cost.costmodel import CostModel
from kvhearth.cost.hardware import Gpu, Link
from kvhearth.cost.layout import Parallelism
from kvhearth.cost.model import Model

__all__ = ["CostModel", "Gpu", "Link", "Model", "Parallelism", "find_gpu", "find_link", "find_model"]
