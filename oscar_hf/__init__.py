"""OscarCache: a 2-bit KV cache that drops into Hugging Face `generate()`.

Names are imported when they are first used: `import oscar_hf` alone loads neither torch nor transformers.
"""

import importlib
from typing import TYPE_CHECKING

from .errors import ArtifactError, CacheStateError, OscarError, UnsupportedModelError

if TYPE_CHECKING:
    from .artifact.artifact import Artifact
    from .artifact.config import OscarConfig
    from .attention.flash import register_attention
    from .cache.memory_report import MemoryReport
    from .cache.oscar_cache import OscarCache, StaticOscarCache
    from .calibration.calibrate import calibrate
    from .calibration.evaluate import evaluate
    from .calibration.fold_values import fold_value_rotation
    from .calibration.retrieval import retrieve
    from .cli.plan import plan
    from .transformers_compat.deferred_stop import deferred_stop

# The one home of the version: pyproject.toml reads it from here.
__version__ = "0.1.0"
__all__ = [
    "Artifact",
    "ArtifactError",
    "CacheStateError",
    "MemoryReport",
    "OscarCache",
    "OscarConfig",
    "OscarError",
    "StaticOscarCache",
    "UnsupportedModelError",
    "calibrate",
    "deferred_stop",
    "evaluate",
    "fold_value_rotation",
    "plan",
    "register_attention",
    "retrieve",
]

# Module of each name that is imported when it is first used. No module directly in this package has one of these names:
# importing it would put the module in the place of the function.
_HOMES = {
    "Artifact": "artifact.artifact",
    "MemoryReport": "cache.memory_report",
    "OscarCache": "cache.oscar_cache",
    "OscarConfig": "artifact.config",
    "StaticOscarCache": "cache.oscar_cache",
    "calibrate": "calibration.calibrate",
    "deferred_stop": "transformers_compat.deferred_stop",
    "evaluate": "calibration.evaluate",
    "fold_value_rotation": "calibration.fold_values",
    "plan": "cli.plan",
    "register_attention": "attention.flash",
    "retrieve": "calibration.retrieval",
}


def __getattr__(name: str):
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        module = importlib.import_module(f".{_HOMES[name]}", __name__)
    except ImportError as error:
        from .requirements import problem

        if not (sentence := problem()):
            raise
        raise ImportError(sentence) from error
    value = globals()[name] = getattr(module, name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
