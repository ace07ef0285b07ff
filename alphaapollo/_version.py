"""Version of the project; between releases, that of the next one with .dev0."""

__version__ = "0.4.0.dev0"
