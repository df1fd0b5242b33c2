"""The errors that this package raises on purpose. All are `ValueError`s, so that existing handlers catch them."""


class OscarError(ValueError):
    """Base class of every error that oscar_hf raises on purpose."""


class ArtifactError(OscarError):
    """An artifact (or an OscarConfig) is missing, incomplete, unsound, or does not fit the model."""


class UnsupportedModelError(OscarError):
    """The model has a layer that this cache cannot hold, with the reason."""


class CacheStateError(OscarError):
    """A cache operation was asked for that the present state of the cache does not allow."""
