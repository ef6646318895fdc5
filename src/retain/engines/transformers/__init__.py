"""The transformers engine: `attach` a model to a cache, and no text is prefilled twice."""

from retain.engines.generation import Generation
from retain.engines.report import Report
from retain.engines.wishes import Sampling, Step
from retain.errors import MissingDependency

try:
    import torch  # noqa: F401
    import transformers  # noqa: F401
except ImportError as error:
    raise MissingDependency(
        f"the transformers engine needs the package {error.name!r}: pip install 'retain[transformers]'"
    ) from error

from .adapter import Engine, Forward, attach
from .alone import Alone

__all__ = ["attach", "Alone", "Engine", "Forward", "Generation", "Report", "Sampling", "Step"]
