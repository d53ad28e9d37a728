"""Local files and the documents in them. Opens regular files only, no links: others may write to the folder."""

import errno
import hashlib
import json
import os
import stat
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, BinaryIO, Final

from protocol.manifest.manifest import FilesSection
from swarm.vocabulary.errors import ConfigError

MAX_FILES: Final = 1_000_000
MAX_DOCUMENTS: Final = 2**24  # Maximum number of documents. An epoch's order takes 16 bytes for each
LINE_BYTES: Final = 2**20

_NEVER: Final = tuple(map(Path, ("/proc", "/sys", "/dev")))  # For example, `/proc/kcore` is a regular file of 128 TiB
_FLAGS: Final = ("O_RDONLY", "O_NOFOLLOW", "O_NONBLOCK", "O_CLOEXEC", "O_BINARY")
_OPEN_FLAGS: Final = sum(getattr(os, name, 0) for name in _FLAGS)

Selection = Callable[[str], bool]


def open_regular(path: Path) -> BinaryIO:
    """Opens a regular file, not a link, for reading. Raises OSError."""
    _check_regular(os.lstat(path), path)  # opening a device can have side effects
    descriptor = os.open(path, _OPEN_FLAGS)
    try:
        _check_regular(os.fstat(descriptor), path)  # it may have been replaced meanwhile
    except OSError:
        os.close(descriptor)
        raise
    return os.fdopen(descriptor, "rb")


def read_named(path: Path, limit: int, hint: str) -> bytes:
    """Reads a file that the user named, also by a link. Raises ConfigError with `hint` if it cannot be read."""
    try:
        with open_regular(resolved(path)) as file:
            content = file.read(limit + 1)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}", hint=hint) from None
    if len(content) > limit:
        raise ConfigError(f"{path} is larger than {limit} bytes")
    require_no_pointer(path, content)
    return content


def require_no_pointer(path: Path, start: bytes) -> None:
    """Raises ConfigError if a file starts as a Git LFS pointer, which replaces a file that was not fetched."""
    if start.startswith(b"version https://git-lfs"):
        raise ConfigError(
            f"{path} is a Git LFS pointer, not the file", hint="Run `git lfs pull` in its folder, or download it again."
        )


def read_table(path: Path, limit: int, hint: str) -> dict[str, Any]:
    """Reads a JSON object from a file that the user named. Raises ConfigError."""
    try:
        table = json.loads(read_named(path, limit, hint))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not JSON: {str(error)[:100]}", hint=hint) from None
    if not isinstance(table, dict):
        raise ConfigError(f"{path} is not a JSON object", hint=hint)
    return table


def resolved(path: Path) -> Path:
    """Resolves the links of a path that the user named. Raises OSError, or ConfigError within /proc, /sys or /dev."""
    real = path.resolve(strict=True)
    if _is_machine(real):
        raise ConfigError(f"{path}: files in {', '.join(map(str, _NEVER))} are not read", hint="Choose another path.")
    return real


class Listing:
    """Regular files below a folder with their sizes, sorted by relative name (with `/`)."""

    def __init__(self, root: Path, found: Iterator[tuple[str, int]], place: Path | None = None) -> None:
        """Takes the only file's path as `place`, if there is just one."""
        self.root, self.place, self.is_folder = root, place or root, place is None
        self.left_out = dict[str, str]()  # Reason for each file that is not used, because it is not text
        entries = []
        for entry in found:
            entries.append(entry)
            if len(entries) > MAX_FILES:
                raise ConfigError(f"{root} has more than {MAX_FILES} files; choose a smaller folder")
        entries.sort()
        self.names = [name for name, _ in entries]
        self.sizes = array("q", (size for _, size in entries))

    def size_of(self, name: str) -> int | None:
        at = bisect_left(self.names, name)
        return self.sizes[at] if at < len(self.names) and self.names[at] == name else None

    def open(self, name: str) -> BinaryIO:
        """Opens a listed file. Raises OSError if it is no longer a regular file of this folder."""
        path = self.root / name
        if os.path.realpath(path) != str(path):  # a folder on the path may have become a link
            raise OSError(errno.ELOOP, "its path contains a link", str(path))
        return open_regular(path)

    def section(self) -> FilesSection:
        """Returns the manifest section that identifies these files by names and sizes, to detect mistakes."""
        digest = hashlib.sha256(b"skipstone-files:")
        for name, size in zip(self.names, self.sizes, strict=True):
            digest.update(b"%b\0%d\n" % (name.encode(errors="surrogateescape"), size))
        return FilesSection(count=len(self.names), bytes=sum(self.sizes), sha256=digest.hexdigest())

    def require(self, expected: FilesSection) -> None:
        """Compares these files with those in the manifest. Raises ConfigError that names the difference."""
        found = self.section()
        if found == expected:
            return
        if (found.count, found.bytes) == (expected.count, expected.bytes):
            differs = f"has as many files and bytes ({found.count}; {found.bytes}), but other names or sizes"
        else:
            run_has = f"the run's text {expected.count} with {expected.bytes}"
            differs = f"has {found.count} files with {found.bytes} bytes in total, {run_has}"
        first = ", ".join(self.names[:3])
        raise ConfigError(
            f"{self.place} is not the text of this run: it {differs}. Its first files: {first}",
            hint="Give the run's unmodified text with --text; ask the run's author for it.",
        )


def everything(name: str) -> bool:
    return True


def files_below(root: Path, folder: Selection = everything, file: Selection = everything) -> Listing:
    """Lists the non-empty regular files below a folder, without links. Raises OSError or ConfigError."""
    root = resolved(root)
    return Listing(root, _walk(str(root), folder, file))


def single_file(path: Path) -> Listing:
    path = resolved(path)
    found = os.lstat(path)
    _check_regular(found, path)
    return Listing(path.parent, iter([(path.name, found.st_size)] if found.st_size else []), path)


def _walk(root: str, folder: Selection, file: Selection) -> Iterator[tuple[str, int]]:
    for at, folders, names in os.walk(root):
        # Changing the list in place makes os.walk skip these folders.
        folders[:] = [name for name in folders if folder(name) and not _is_machine(Path(at, name))]
        prefix = "" if at == root else f"{Path(at).relative_to(root).as_posix()}/"
        for name in filter(file, names):
            found = os.lstat(os.path.join(at, name))
            if stat.S_ISREG(found.st_mode) and found.st_size:
                yield prefix + name, found.st_size


def is_visible(name: str) -> bool:
    return not name.startswith(".")


def _is_machine(real: Path) -> bool:
    return any(place == real or place in real.parents for place in _NEVER)


def _check_regular(found: os.stat_result, path: Path) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.EINVAL, "not a regular file", str(path))


class DocumentNames(Sequence[str]):
    """Names `FILE@START` of the documents in several files, computed on demand. Raises ConfigError for too many."""

    def __init__(self, files: Sequence[str], starts: Sequence[Sequence[int]], *, is_plain: bool = False) -> None:
        """Takes the start of each document of each file. `is_plain`: a document that starts at 0 is named `FILE`."""
        self._files, self._starts, self._is_plain = files, starts, is_plain
        self._ends = array("q", accumulate(map(len, starts)))
        if len(self) > MAX_DOCUMENTS:
            raise ConfigError(f"data.source has {len(self)} documents, more than {MAX_DOCUMENTS}", hint="Use a part.")

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[number] for number in range(len(self))[index]]
        number = range(len(self))[index]
        file = bisect_right(self._ends, number)
        start = self._starts[file][number - (self._ends[file - 1] if file else 0)]
        return self._files[file] if self._is_plain and not start else f"{self._files[file]}@{start}"
