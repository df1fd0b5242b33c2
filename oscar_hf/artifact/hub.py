"""Where the files of an artifact are: a local folder, or files of a Hub repository through huggingface_hub."""

import importlib
import importlib.util
import os
from pathlib import Path, PureWindowsPath
from typing import TypedDict

from huggingface_hub import _CACHED_NO_EXIST, hf_hub_download, try_to_load_from_cache
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from typing_extensions import Unpack

from ..errors import ArtifactError


class HubOptions(TypedDict, total=False):
    """Where an artifact is and how the Hub is asked for it, as keyword arguments of what loads one.

    All but subfolder are huggingface_hub's own and matter for the Hub only.
    """

    subfolder: str | None
    """Folder inside the folder or repository."""
    revision: str | None
    """Branch, tag or commit."""
    token: str | bool | None
    """Access token; None for the one that huggingface_hub has stored."""
    cache_dir: str | os.PathLike | None
    """Where downloads are kept; None for the Hub cache."""
    local_files_only: bool
    """Take what was downloaded before, without asking the Hub."""


def resolve(name_or_path: str | os.PathLike, choices: list[list[str]], **hub_options: Unpack[HubOptions]) -> Path:
    """Local folder that holds the files of the artifact, downloading them (with progress bars) if need be.

    choices: lists of file names; the first list whose first file exists in the repository is downloaded whole, all its
    files from one commit.
    """
    for option in hub_options:
        if option not in HubOptions.__annotations__:
            raise TypeError(
                f"unexpected keyword argument {option!r}: allowed are {', '.join(HubOptions.__annotations__)}"
            )
    local_files_only = hub_options.pop("local_files_only", False)
    subfolder = _plain_subfolder(hub_options.pop("subfolder", None))
    if not isinstance(name_or_path, (str, os.PathLike)) or not str(name_or_path).strip():
        given = repr(name_or_path) if isinstance(name_or_path, str) else f"a {type(name_or_path).__name__}"
        raise ArtifactError(
            f"an artifact is named by a folder or a Hub repository id 'owner/name' (or is an Artifact), got {given}"
        )
    path = Path(name_or_path)
    if path.is_dir():
        folder = path / subfolder if subfolder else path
        if not folder.is_dir():
            raise ArtifactError(f"subfolder {subfolder!r} does not exist in {path}: name one that does")
        return folder
    name = str(name_or_path)
    if path.is_absolute() or path.exists() or name.startswith((".", "~")) or name.count("/") > 1:
        raise ArtifactError(
            f"{name!r} is not a folder: give the folder of an artifact, or a Hub repository id 'owner/name' "
            "(a folder inside it goes into subfolder)"
        )
    options = dict(repo_id=name, revision=None, subfolder=subfolder, token=None, cache_dir=None) | hub_options
    options["token"] = _plain_token(options["token"])
    offline, unreachable = local_files_only, None
    for files in choices:
        try:
            first = _download(files[0], offline, options)
        except LocalEntryNotFoundError as error:
            # The Hub is out of reach; the cache may still hold another kind of artifact, so look on, there alone.
            offline, unreachable = True, error
            continue
        if first is None:
            continue
        try:
            _download_rest(first, files, offline, options)
        except LocalEntryNotFoundError as error:
            if local_files_only:
                # The reader of the folder says in its own words what is missing.
                return first.parent
            raise ArtifactError(_out_of_reach(name)) from error
        return first.parent
    where = f"{name}/{subfolder}" if subfolder else name
    if local_files_only:
        raise ArtifactError(
            f"{where!r} is not in the local Hub cache: allow the download (local_files_only=False) once"
        )
    if unreachable is not None:
        raise ArtifactError(_out_of_reach(name)) from unreachable
    names = ", ".join(files[0] for files in choices)
    raise ArtifactError(
        f"the Hub repository {where!r} holds none of {names}: give the repository (and subfolder) of an artifact"
    )


def _plain_token(token: str | bool | None) -> str | bool | None:
    """The token without what a file or a prompt leaves around it. It is never quoted, whatever is wrong with it."""
    if not isinstance(token, str):
        return token
    token = token.strip()
    if not token.isascii() or " " in token or (token and not token.isprintable()):
        raise ArtifactError("token: it holds spaces, line breaks or letters that no token has: give the token alone")
    return token or None


def _plain_subfolder(subfolder) -> str | None:
    """subfolder with single forward slashes; refuses one that leads out of the folder it is in."""
    if subfolder is None:
        return None
    # Reads both kinds of slash and drive letters, whatever the system.
    path = PureWindowsPath(os.fspath(subfolder))
    if path.anchor or ".." in path.parts:
        raise ArtifactError(
            f"subfolder: got {str(subfolder)!r}, allowed is a relative path inside the artifact without '..'"
        )
    return "/".join(path.parts) or None


def _download(file: str, local_files_only: bool, options: dict) -> Path | None:
    """Path of a file in the Hub cache, None if the repository has no such file; ArtifactError for what the Hub refuses.

    Raises LocalEntryNotFoundError where the file is not in the cache and the Hub may not or cannot be asked.
    """
    try:
        return Path(hf_hub_download(filename=file, local_files_only=local_files_only, **options))
    except LocalEntryNotFoundError:
        raise
    except EntryNotFoundError:
        return None
    # The connection broke, the disk is full (OSError), or the name is malformed (ValueError).
    except (*_transport_errors(), OSError, ValueError) as error:
        raise ArtifactError(_explain(options["repo_id"], options["revision"], error)) from error


def _transport_errors() -> list[type[Exception]]:
    """What huggingface_hub lets through of its HTTP library when a connection breaks: httpx, since hub 2 its fork httpx2."""
    names = [name for name in ("httpx", "httpx2") if importlib.util.find_spec(name)]
    return [importlib.import_module(name).HTTPError for name in names]


def _download_rest(first: Path, files: list[str], local_files_only: bool, options: dict) -> None:
    """Fetch the other files of a list from the commit of the first, whatever happened to the branch since."""
    depth = len(Path(options["subfolder"] or "", files[0]).parts)
    pinned = {**options, "revision": first.parents[depth - 1].name}
    for file in files[1:]:
        relative = f"{options['subfolder']}/{file}" if options["subfolder"] else file
        known = try_to_load_from_cache(
            options["repo_id"], relative, cache_dir=options["cache_dir"], revision=pinned["revision"]
        )
        if known is not _CACHED_NO_EXIST:
            _download(file, local_files_only, pinned)


def _out_of_reach(name: str) -> str:
    return (
        f"there is no folder {name!r} here, it is not in the local Hub cache, and the Hub cannot be reached: connect, set "
        "HF_ENDPOINT, or give a folder that exists"
    )


def _explain(name: str, revision: str | None, error: Exception) -> str:
    if isinstance(error, GatedRepoError):
        return f"the Hub repository {name!r} is gated: accept its terms on the Hub and pass token=..."
    if isinstance(error, RepositoryNotFoundError):
        return f"no Hub repository {name!r} that you may read: check the name, or pass token=... if it is private"
    if isinstance(error, RevisionNotFoundError):
        return f"the Hub repository {name!r} has no revision {revision!r}: name a branch, tag or commit that it has"
    if isinstance(error, HFValidationError):
        return f"{name!r} is neither a folder nor a Hub repository id 'owner/name'"
    return f"{name!r} could not be read from the Hub: {_reason(error)}"


def _reason(error: Exception) -> str:
    """What went wrong, in our words: the text of somebody else's exception may hold a token, a password or a signed address."""
    status = getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(status, int):
        return f"it answered with status {status}"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return f"{type(error).__name__} while its files were fetched"
