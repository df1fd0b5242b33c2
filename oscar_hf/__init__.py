"""OscarCache: a 2-bit KV cache that drops into Hugging Face `generate()`."""

from .artifact import Artifact
from .cache import OscarCache
from .calibrate import calibrate
from .compat import deferred_stop
from .config import OscarConfig
from .errors import ArtifactError, CacheStateError, OscarError, UnsupportedModelError

__version__ = "0.1.0"
__all__ = [
    "Artifact",
    "ArtifactError",
    "CacheStateError",
    "OscarCache",
    "OscarConfig",
    "OscarError",
    "UnsupportedModelError",
    "calibrate",
    "deferred_stop",
]
