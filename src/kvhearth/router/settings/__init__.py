"""The router's settings: flags, the environment (``KVHEARTH_ROUTER_<GROUP>_<NAME>``) and a YAML file."""

from kvhearth.router.settings.reading import config_path, read_router_settings
from kvhearth.router.settings.shown import as_yaml
from kvhearth.router.settings.table import LEAVES, PANELS, TABLE

__all__ = ["LEAVES", "PANELS", "TABLE", "as_yaml", "config_path", "read_router_settings"]
