"""The artefact store: finished kernels on disk, keyed by content.

    <root>/<digest of sources and flags>/<name>.<compiler tag>.<suffix>

Concurrency. Anybody may read at any time; a reader sees a whole artefact or none, because a writer fills a temporary
file in the same folder and renames it. Writers of one artefact take a file lock, so that ranks of one job do not all
compile the same kernel; a lock that is not had within LOCK_TIMEOUT_S seconds is ignored (its holder may hang, and a
second build costs time, not correctness: both publish the same bytes). Nothing is changed in place or deleted.

A folder that cannot be written (full, read-only) costs the other processes what this one has built: it warns once, and
keeps what it could not publish until it ends.

Damage. Every artefact ends in a seal: the SHA-256 of what comes before it, and a magic number. What does not verify
(a full disk, a killed copy) counts as absent and is built again. A loader of ELF ignores bytes after its end.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import hashlib
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

log = logging.getLogger("ltx_inductor")
LOCK_TIMEOUT_S = 300.0
_MAGIC = b"LTXSEAL1"
_SEAL = hashlib.sha256().digest_size + len(_MAGIC)
_kept: dict[Path, bytes] = {}  # what could not be published, by where it should be
_warned: set[Path] = set()  # folders


def cache_root() -> Path:
    """The cache folder: LTX_INDUCTOR_CACHE, or the user's cache folder of the platform. It need not exist."""
    chosen = os.environ.get("LTX_INDUCTOR_CACHE")
    if chosen:
        return Path(chosen).expanduser().absolute()
    import platformdirs

    return Path(platformdirs.user_cache_dir("ltx_inductor"))


def sealed(payload: bytes) -> bytes:
    """`payload` with the seal appended."""
    return payload + hashlib.sha256(payload).digest() + _MAGIC


def unsealed(content: bytes) -> bytes | None:
    """The payload of a sealed file's content, or None if it is truncated or corrupt."""
    payload, seal = content[:-_SEAL], content[-_SEAL:]
    if len(content) <= _SEAL or seal != hashlib.sha256(payload).digest() + _MAGIC:
        return None
    return payload


def read(path: Path) -> bytes | None:
    """The payload of the artefact at `path`; None if it is not there, not readable or does not verify."""
    if path in _kept:
        return _kept[path]
    try:
        return unsealed(path.read_bytes())
    except OSError:
        return None


def publish(path: Path, payload: bytes) -> None:
    """Puts the sealed payload at `path`, atomically. Raises OSError where the folder cannot be written."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(prefix=path.name + ".", suffix=".tmp", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(sealed(payload))
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)  # mkstemp makes it private; a shared cache is read by others
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def read_or_build(path: Path, build: Callable[[], bytes], timeout_s: float = LOCK_TIMEOUT_S) -> bytes:
    """The payload at `path`, built first if it is absent or damaged, and published where that can be.

    Raises whatever `build` raises.
    """
    payload = read(path)
    if payload is not None:
        return payload
    with _locked(path, timeout_s):
        payload = read(path)  # whoever held the lock may have built it
        if payload is None:
            payload = build()
            try:
                publish(path, payload)
            except OSError as error:
                _kept[path] = payload
                _warn_once(path.parent, error)
        return payload


@contextlib.contextmanager
def _locked(path: Path, timeout_s: float) -> Iterator[None]:
    """Holds the lock of `path`, if it can be had."""
    import filelock

    lock = filelock.FileLock(str(path) + ".lock")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=timeout_s)
    except filelock.Timeout:  # see Concurrency
        log.warning(
            "another process has held the lock %s.lock for %g s and may hang: building without it", path, timeout_s
        )
    except OSError as error:  # publishing will fail too, and tell
        log.debug("no lock %s.lock: %s", path, error)
    try:
        yield
    finally:
        if lock.is_locked:
            lock.release()


def as_file(path: Path) -> Path:
    """A file with the payload of `path`, to be loaded by its name: `path`, or this process's own copy of what could not
    be published. Raises OSError where not even a temporary file can be written."""
    if path not in _kept:
        return path
    copy = _private_folder() / path.name
    if not copy.exists():
        publish(copy, _kept[path])
    return copy


@functools.cache
def _private_folder() -> Path:
    folder = tempfile.mkdtemp(prefix="ltx-inductor-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


def unpublished() -> list[Path]:
    """Where the artefacts should be that only this process has."""
    return sorted(_kept)


def _warn_once(folder: Path, error: OSError) -> None:
    if folder in _warned:
        return
    _warned.add(folder)
    log.warning(
        "the kernel cache cannot be written (%s): every process builds its kernels again; set LTX_INDUCTOR_CACHE to a "
        "folder that can be written",
        error,
    )
