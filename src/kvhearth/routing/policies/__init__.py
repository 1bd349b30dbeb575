"""The policies, one a file. They share the border in `routing.ports` and nothing else but `least_loaded.lightest`."""
