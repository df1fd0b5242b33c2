"""OscarCache: a 2-bit KV cache that drops into Hugging Face `generate()`."""

from .artifact.artifact import Artifact
from .artifact.config import OscarConfig
from .cache.oscar_cache import OscarCache
from .calibration.calibrate import calibrate
from .errors import ArtifactError, CacheStateError, OscarError, UnsupportedModelError
from .transformers_compat.model_config import deferred_stop

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
