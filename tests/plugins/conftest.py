"""Folders of tiny models for the tests of plug-ins, as for tests/unit."""

from tests.unit.conftest import model_folder as model_folder
from tests.unit.conftest import vision_folder as vision_folder
