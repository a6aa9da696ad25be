"""The one part of the build that pyproject.toml cannot say: the C extensions.

They are optional: without a compiler everything else works, fewer codecs are offered, and a token
that is relayed costs more.
"""

import sys

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel

SOURCES = ["exponent", "int8", "module", "rans", "rans_avx2", "rans_avx512", "transform"]
HEADERS = ["ladder", "native", "rans", "rans_tables"]
# Without contraction every CPU gets the same bits: see native.h.
UNIX_FLAGS = ["-O2", "-std=gnu11", "-fno-math-errno", "-ffp-contract=off", "-Wall"]
FLAGS = [] if sys.platform == "win32" else UNIX_FLAGS


class AbiWheel(bdist_wheel):
    """One wheel for every Python from 3.11 on."""

    def get_tag(self) -> tuple[str, str, str]:
        python, abi, platform = super().get_tag()
        return ("cp311", "abi3", platform) if python.startswith("cp") else (python, abi, platform)


setup(
    cmdclass={"bdist_wheel": AbiWheel},
    ext_modules=[
        Extension(
            "prfaas.codecs._native",
            [f"prfaas/codecs/csrc/{name}.c" for name in SOURCES],
            depends=[f"prfaas/codecs/csrc/{name}.h" for name in HEADERS],
            extra_compile_args=FLAGS,
            py_limited_api=True,
            optional=True,
        ),
        Extension(
            "gateway._events",
            ["gateway/csrc/events.c"],
            extra_compile_args=FLAGS,
            py_limited_api=True,
            optional=True,
        ),
    ],
)
