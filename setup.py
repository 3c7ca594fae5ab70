"""Builds the CPU update kernel into the package, where a C compiler is at hand.

Everything else stands in pyproject.toml. Without a compiler the installation goes on (`optional=True`): the kernel is
then compiled on first use, or the same update runs in PyTorch. It is a plain shared library, loaded with ctypes, and
needs no Python headers.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError


def load_compiler() -> ModuleType:
    """megatrain/optim/compiler.py, loaded alone: the package itself needs torch, which a build has not."""
    path = Path(__file__).parent / "megatrain" / "optim" / "compiler.py"
    spec = importlib.util.spec_from_file_location("kernel_compiler", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


compiler = load_compiler()


class BuildKernel(build_ext):
    """Compiles the kernel as it is compiled on first use, under the name that the package looks for."""

    def get_ext_filename(self, fullname: str) -> str:
        return str(Path(*fullname.split(".")[:-1]) / compiler.LIBRARY_NAME)

    def build_extension(self, ext: Extension) -> None:
        try:
            compiler.compile_kernel(Path(self.get_ext_fullpath(ext.name)).absolute())
        except (compiler.CompileError, OSError) as error:
            raise CompileError(f"the CPU update kernel was not compiled: {error}") from error


setup(
    ext_modules=[Extension("megatrain.optim._kernel", sources=["megatrain/optim/kernel.c"], optional=True)],
    cmdclass={"build_ext": BuildKernel},
)
