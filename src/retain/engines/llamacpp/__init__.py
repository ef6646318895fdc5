"""The llama.cpp engine: `attach` a GGUF file to a cache, and no text is prefilled twice."""

from retain.errors import MissingDependency

try:
    import llama_cpp  # noqa: F401
except ImportError as error:
    raise MissingDependency(
        f"the llama.cpp engine needs the package llama-cpp-python ({error}): pip install 'retain[llamacpp]'"
    ) from error

from retain.engines.generation import Generation
from retain.engines.report import Report
from retain.engines.wishes import Sampling, Step

from .adapter import Engine, Forward, attach
from .host import Settings

__all__ = ["attach", "Engine", "Forward", "Generation", "Report", "Sampling", "Settings", "Step"]
