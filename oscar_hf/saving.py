"""Folders and files that this package writes. Everything new exists before anything old goes, what was there comes back if that
fails, and nothing goes that is not the writer's own."""

import os
import shutil
import socket
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePath

from .errors import OscarError, first_line

# A scratch folder of a process that is gone is removed by the next save, once it is that old.
_STALE_SECONDS = 600


def _scratch_path(target: Path, what: str) -> Path:
    """A name beside a target that says what it is, of which process: `.cache.saving-HOST-PID-...`."""
    return target.with_name(f".{target.name}.{what}-{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}")


def _remove_stale(target: Path) -> None:
    """Remove what processes of this machine that were killed while they saved to `target` left beside it."""
    for path in target.parent.glob(f".{target.name}.saving-{socket.gethostname()}-*"):
        parts = path.name.rsplit("-", 2)
        is_over = len(parts) == 3 and parts[1].isdecimal() and not _is_running(int(parts[1]))
        if is_over and time.time() - path.stat().st_mtime > _STALE_SECONDS:
            shutil.rmtree(path, ignore_errors=True)


def _is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def check_own(folder: Path, is_own: Callable[[PurePath], bool], what: str) -> None:
    """Raise OscarError if a folder holds anything but files of the writer's own, at any depth.

    is_own: of the path of a file inside the folder. what: what the writer writes.
    """
    if folder.exists() and not folder.is_dir():
        raise OscarError(f"{folder} is a file: give a folder to save {what} in")
    others = []
    for root, folders, files in os.walk(folder):
        inside = [Path(root, name).relative_to(folder) for name in files]
        inside += [Path(root, name).relative_to(folder) for name in folders if not any(os.scandir(Path(root, name)))]
        others += [str(path) for path in inside if not is_own(path)]
    if others:
        raise OscarError(
            f"{folder} holds other files than {what} ({', '.join(sorted(others))[:200]}), which saving would remove: give a new or "
            "an empty folder"
        )


@contextmanager
def replaced_folder(target: Path, what: str) -> Iterator[Path]:
    """A new folder to write to, which takes the place of `target` at the end; with an error, an interrupt as well, `target` stays
    as it was. Modes are those of the folder that was there, or what the process gives to new files. OscarError for what the
    system refuses. what: what is saved."""
    scratch, old = _scratch_path(target, "saving"), _scratch_path(target, "saving")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _remove_stale(target)
        # Not tempfile's: its folders are private, whatever the process gives to others.
        scratch.mkdir()
        mode = (target if target.is_dir() else scratch).stat().st_mode & 0o7777
        yield scratch
        for path in (*scratch.rglob("*"), scratch):
            _set_mode(path, mode if path.is_dir() else mode & 0o666)
        try:
            if target.is_dir():
                os.replace(target, old)
            os.replace(scratch, target)
        except BaseException:
            if old.is_dir() and not target.is_dir():
                os.replace(old, target)
            raise
    except OSError as error:
        raise OscarError(
            f"cannot save {what} in {target}: {error.strerror or first_line(error)}; nothing there was changed"
        ) from error
    finally:
        for path in (scratch, old):
            # The old folder goes only once the new one stands.
            if path is scratch or target.is_dir():
                shutil.rmtree(path, ignore_errors=True)


def replace_files(
    folder: Path, writers: dict[str, Callable[[Path], object]], remove: tuple[str, ...], what: str
) -> None:
    """Write files into a folder, made if need be, and remove others, as one: what the writers raise, and an interrupt, leave the
    files that were there. OscarError for what the system refuses.

    writers: by file name, what writes it to a path. what: what is saved.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _replace_files(folder, writers, remove)
    except OSError as error:
        raise OscarError(
            f"cannot save {what} in {folder}: {error.strerror or first_line(error)}; nothing there was changed"
        ) from error


def _replace_files(folder: Path, writers: dict[str, Callable[[Path], object]], remove: tuple[str, ...]) -> None:
    made, kept = {}, {}
    try:
        for name, write in writers.items():
            made[name] = path = _scratch_path(folder / name, "saving")
            # The mode that the process gives to new files; safetensors would make a private one.
            path.touch(exist_ok=False)
            mode = (folder / name if (folder / name).is_file() else path).stat().st_mode & 0o7777
            write(path)
            _set_mode(path, mode)
        try:
            for name in (*writers, *remove):
                if (folder / name).exists():
                    old = _scratch_path(folder / name, "saving")
                    kept[name] = old
                    os.replace(folder / name, old)
            for name, path in made.items():
                os.replace(path, folder / name)
        except BaseException:
            for name, old in kept.items():
                if old.exists():
                    os.replace(old, folder / name)
            raise
    finally:
        for path in (*made.values(), *kept.values()):
            path.unlink(missing_ok=True)


def _set_mode(path: Path, mode: int) -> None:
    try:
        os.chmod(path, mode)
    except OSError:
        # Some file systems know no modes.
        return
