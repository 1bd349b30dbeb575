"""A server's settings from where people write them: flags, then the environment, then a YAML file, then the defaults.

What may be set is a table that the server makes; this reads text into values and names the place of every mistake.
"""

from kvhearth.settings.secret_file import read_secret_file
from kvhearth.settings.setting import Given, Setting
from kvhearth.settings.table import Table, markdown_table
from kvhearth.settings.values import default_text, read, read_pairs, read_texts, shown
from kvhearth.settings.yaml_file import read_yaml

__all__ = [
    "Given",
    "Setting",
    "Table",
    "default_text",
    "markdown_table",
    "read",
    "read_pairs",
    "read_secret_file",
    "read_texts",
    "read_yaml",
    "shown",
]
