"""The errors that this package raises on purpose. All are `ValueError`s, so that existing handlers catch them."""


class OscarError(ValueError):
    """Base class of every error that oscar_hf raises on purpose."""


class ArtifactError(OscarError):
    """An artifact (or an OscarConfig) is missing, incomplete, unsound, or does not fit the model."""


class UnsupportedModelError(OscarError):
    """The model has a layer that this cache cannot hold, with the reason."""


class CacheStateError(OscarError):
    """A cache operation was asked for that the present state of the cache does not allow."""


def first_line(error: Exception) -> str:
    """What an exception of somebody else's says, in one line: its first, or its class where it says nothing."""
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
