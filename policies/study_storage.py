"""Where a study lives: a file, Redis, or a database; one or many machines work on it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from prfaas.errors import ConfigError

if TYPE_CHECKING:
    from optuna.storages import BaseStorage
    from optuna.storages.journal import JournalFileOpenLock

FIRST_LINE_BYTES = 1 << 20
PREFIX = "prfaas:studies"
"""Of all keys in Redis."""


def open_storage(where: str) -> BaseStorage:
    """A path, `redis://` or `rediss://`, or the URL of a database as SQLAlchemy has them.

    Raises ConfigError where it cannot be reached, or a package for it is missing.
    """
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    if "://" not in where:
        try:
            if not _may_be_a_journal(Path(where)):
                raise ConfigError(f"the study's storage {where} is not a journal of Optuna's")
            return JournalStorage(JournalFileBackend(where, lock_obj=_lock(where)))
        except OSError as error:
            raise ConfigError(f"the study's storage {where}: {error.strerror}") from error
    if where.startswith(("redis://", "rediss://")):
        return _in_redis(where)
    return _in_database(where)


@contextmanager
def storage_errors(where: str) -> Iterator[None]:
    """What a storage raises while a study runs, as ConfigError: a full disk, a database that went.

    Optuna fails once more where it cannot note a failure; the storage's own word is what counts.
    """
    try:
        yield
    except Exception as error:
        raised: BaseException | None = error
        while raised is not None and not _of_a_storage(raised):
            raised = raised.__cause__ or raised.__context__
        if raised is None or isinstance(error, ConfigError):
            raise
        said = raised.strerror if isinstance(raised, OSError) else str(raised).partition("\n")[0]
        raise ConfigError(f"the study's storage {shown(where)}: {said or raised}") from error


def _of_a_storage(error: BaseException) -> bool:
    return isinstance(error, OSError) or type(error).__module__.startswith(
        ("redis.", "sqlalchemy.")
    )


def shown(where: str) -> str:
    """For people: without a password."""
    if "://" not in where:
        return where
    parts = urlsplit(where)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()


def _may_be_a_journal(path: Path) -> bool:
    """Whether the file's first line is one of a journal's, or it has none yet: what is written to a
    file of something else is there for good."""
    if not path.exists():
        return True
    with path.open("rb") as file:
        line = file.readline(FIRST_LINE_BYTES)
    try:
        first = json.loads(line) if line else {"op_code": None}
    except ValueError:
        return False
    return isinstance(first, dict) and "op_code" in first


def _in_redis(url: str) -> BaseStorage:
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalRedisBackend

    try:
        from redis.exceptions import RedisError
    except ImportError as error:
        raise ConfigError("a study in Redis needs redis-py: pip install 'prfaas[redis]'") from error
    try:
        return JournalStorage(JournalRedisBackend(url, prefix=PREFIX))
    except (RedisError, ValueError) as error:
        raise ConfigError(f"the study's storage {shown(url)}: {error}") from error


def _in_database(url: str) -> BaseStorage:
    from optuna.storages import RDBStorage
    from sqlalchemy.exc import SQLAlchemyError

    try:
        return RDBStorage(url)
    except ImportError as error:
        raise ConfigError(
            f"the study's storage {shown(url)} needs a driver that is not installed: {error}"
        ) from error
    except SQLAlchemyError as error:
        first = str(error).partition("\n")[0]
        raise ConfigError(f"the study's storage {shown(url)}: {first}") from error


def _lock(path: str) -> JournalFileOpenLock:
    """A lock of the kernel's, which ends with the process that holds it; Optuna's own outlives a
    kill by half a minute."""
    import fcntl

    from optuna.storages.journal import JournalFileOpenLock

    class KernelLock(JournalFileOpenLock):
        """Owns a descriptor while it is held."""

        def __init__(self) -> None:
            super().__init__(path)
            self._descriptor = -1

        def acquire(self) -> bool:
            descriptor = os.open(f"{path}.lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            self._descriptor = descriptor
            return True

        def release(self) -> None:
            os.close(self._descriptor)

    return KernelLock()
