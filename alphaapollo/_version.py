"""Version of the project; between releases, the version of the next release with .dev0."""

__version__ = "0.4.0.dev0"
