"""Modules that the zygote (pre-forked interpreter) imports, because importing them per snippet would take seconds."""

from __future__ import annotations

import sys

PACKAGES = ["numpy", "scipy", "sympy", "mpmath"]  # packages that snippets can import, if they are installed

_STANDARD = """
abc argparse array ast asyncio base64 binascii bisect builtins calendar cmath codecs collections collections.abc
concurrent.futures contextlib copy csv dataclasses datetime decimal difflib doctest enum errno fractions functools
gettext glob hashlib heapq hmac html html.parser inspect io itertools json keyword linecache locale logging math
numbers operator os.path pathlib pickle platform pprint queue random re reprlib secrets shlex shutil signal socket
sqlite3 ssl stat statistics string struct subprocess sys tempfile textwrap threading time timeit token tokenize
traceback types typing unicodedata unittest unittest.mock urllib.parse uuid warnings weakref xml.etree.ElementTree
zlib zoneinfo
"""
_SCIENTIFIC = """
numpy numpy.fft numpy.linalg numpy.polynomial numpy.random scipy scipy.constants scipy.integrate scipy.interpolate
scipy.linalg scipy.optimize scipy.signal scipy.sparse scipy.sparse.linalg scipy.spatial scipy.special scipy.stats
mpmath sympy sympy.abc sympy.combinatorics sympy.geometry sympy.logic sympy.ntheory sympy.parsing.sympy_parser
sympy.stats sympy.vector
"""
MODULES = f"{_STANDARD} {_SCIENTIFIC}".split()


def trigger_lazy_imports() -> None:
    """Trigger lazy imports of numpy and sympy now: without Landlock, the seccomp filter lets snippets open no files."""
    if "sympy" in sys.modules:
        import sympy

        x = sympy.Symbol("x")
        sympy.integrate(sympy.exp(-x) * sympy.sin(x), x)
        sympy.simplify((x**2 - 1) / (x - 1) + sympy.sin(x) ** 2 + sympy.cos(x) ** 2)
        sympy.solve(x**2 - 2, x)
        sympy.factorint(360)
        sympy.parsing.sympy_parser.parse_expr("2*x + sqrt(2)").evalf()
        sympy.Matrix([[1, 2], [3, 4]]).eigenvals()
        sympy.Sum(x, (x, 1, 10)).doit()
        sympy.limit(sympy.sin(x) / x, x, 0)
    if "numpy" in sys.modules:
        import numpy

        numpy.linalg.solve(numpy.eye(2), numpy.ones(2))
        numpy.linalg.eigvals(numpy.eye(2))
