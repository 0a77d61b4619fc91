"""Models on the Hugging Face hub, or on what HF_ENDPOINT names.

In: `hf:ORG/REPO` or `hf:ORG/REPO/FILE.gguf`. Out: the file, or all files of a split one, of a single commit. The
package huggingface_hub (extra `everwarm[hf]`) knows the protocol, tokens and proxies; hashes are compared here, with
what the hub says about the file.
"""

import importlib.util
import os
import re
import shutil
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from everwarm.errors import PullError
from everwarm.pull import store, watch
from everwarm.pull.store import Progress

PREFIX = "hf:"
_SPEC = re.compile(r"hf:(?P<repo>[\w.-]+/[\w.-]+)(/(?P<file>[^\\:]+\.gguf))?")
_SPLIT = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")

_GATED = "the repository is gated: accept its terms on the hub, then set HF_TOKEN"
_REFUSED = "the hub does not accept this HF_TOKEN: make a new one on the hub"
_LOST = "the hub no longer has the file, or not for this HF_TOKEN: look at its page on the hub"

_DOWNLOAD = f"""
import sys
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import EntryNotFoundError, GatedRepoError, HfHubHTTPError, RepositoryNotFoundError
repo, file, revision, folder = sys.argv[1:]
try:
    hf_hub_download(repo, file, revision=revision, local_dir=folder)
except GatedRepoError:
    sys.exit({_GATED!r})
except (EntryNotFoundError, RepositoryNotFoundError):
    sys.exit({_LOST!r})
except HfHubHTTPError as error:
    if error.response is not None and error.response.status_code == 401:
        sys.exit({_REFUSED!r})
    raise
"""


@dataclass(frozen=True, slots=True)
class Spec:
    """A repository, and perhaps a file in it."""

    repo: str
    file: str | None

    def __str__(self) -> str:
        """As the user writes it."""
        return PREFIX + self.repo + (f"/{self.file}" if self.file else "")


def is_spec(text: str) -> bool:
    """Whether it is meant for the hub."""
    return text.startswith(PREFIX)


def parse(text: str) -> Spec:
    """Raises PullError for anything but `hf:ORG/REPO[/FILE.gguf]`."""
    found = _SPEC.fullmatch(text)
    if found is None or any(step in ("", ".", "..") for step in text.removeprefix(PREFIX).split("/")):
        raise PullError(f"{text!r}: expected hf:ORG/REPO or hf:ORG/REPO/FILE.gguf")
    return Spec(found["repo"], found["file"])


def pull(spec: Spec, home: Path, report: Progress, check: bool) -> Path:
    """Fetch, check and install, unless it is there."""
    if importlib.util.find_spec("huggingface_hub") is None:
        raise PullError(f"{spec}: needs the package huggingface_hub; run: pip install 'everwarm[hf]'")
    if spec.file is not None and (path := store.present(home, str(spec), report, check)) is not None:
        return path  # without asking the hub
    listing = _list(spec)
    files = _choose(spec, listing.sizes)
    name = str(Spec(spec.repo, files[0]))
    total = sum(listing.sizes[file] for file in files)
    with store.locked(home, name, report):
        if (path := store.present(home, name, report, check)) is not None:
            return path
        store.check_space(home, name, total)
        with store.staging(home, name) as stage:
            fetched: list[store.File] = []
            folder = stage / "model"
            folder.mkdir()
            for file in files:
                before = sum(each.size_bytes for each in fetched)
                fetched.append(_fetch(spec, file, listing, stage, before, total, report))
            source = f"{listing.endpoint}/{spec.repo}@{listing.revision}"
            return store.install(home, folder, name, tuple(fetched), source, listing.licence)


@dataclass(frozen=True, slots=True)
class _Listing:
    """What the hub says about a repository."""

    endpoint: str
    revision: str
    licence: str
    sizes: dict[str, int]
    hashes: dict[str, str]


def _list(spec: Spec) -> _Listing:
    from huggingface_hub import HfApi  # slow to import, and optional
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError

    api = HfApi(endpoint=os.environ.get("HF_ENDPOINT"))  # the package reads the variable at import only
    try:
        info = api.model_info(spec.repo, files_metadata=True, timeout=30)
    except GatedRepoError as error:
        raise PullError(f"{spec}: {_GATED}") from error
    except RepositoryNotFoundError as error:
        raise PullError(f"{spec}: no such repository on {api.endpoint}; if it is private, set HF_TOKEN") from error
    except Exception as error:  # the package's HTTP library, and so its errors, depend on its version
        if isinstance(error, HfHubHTTPError) and error.response is not None and error.response.status_code == 401:
            raise PullError(f"{spec}: {_REFUSED}") from error
        raise PullError(
            f"{spec}: can't ask {api.endpoint} ({_first_line(error)}); check the network or HF_ENDPOINT and run again"
        ) from error
    files = [file for file in info.siblings or [] if file.rfilename.endswith(".gguf")]
    licences = [tag.removeprefix("license:") for tag in info.tags or [] if tag.startswith("license:")]
    return _Listing(
        endpoint=api.endpoint,
        revision=info.sha or "main",
        licence=licences[0] if licences else "unknown",
        sizes={file.rfilename: file.size or 0 for file in files},
        hashes={file.rfilename: file.lfs["sha256"] for file in files if file.lfs is not None},
    )


def _first_line(error: Exception) -> str:
    return next((" ".join(line.split()) for line in str(error).splitlines() if line.strip()), type(error).__name__)[
        :300
    ]


def _choose(spec: Spec, sizes: dict[str, int]) -> list[str]:
    """The wanted file, or all files of the split one that it belongs to."""
    if spec.file is not None:
        if spec.file not in sizes:
            raise PullError(f"{spec}: no such file in the repository; it has: {_names(sizes)}")
        return _whole(spec, spec.file, sizes)
    firsts = [file for file in sorted(sizes) if (split := _SPLIT.fullmatch(file)) is None or int(split["number"]) == 1]
    if not firsts:
        raise PullError(f"{spec}: the repository has no .gguf files")
    if len(firsts) > 1:
        raise PullError(f"{spec}: the repository has several models, name one, as in {spec}/FILE: {_names(firsts)}")
    return _whole(spec, firsts[0], sizes)


def _whole(spec: Spec, file: str, sizes: dict[str, int]) -> list[str]:
    split = _SPLIT.fullmatch(file)
    if split is None:
        return [file]
    files = [f"{split['stem']}-{number:05}-of-{split['count']}.gguf" for number in range(1, int(split["count"]) + 1)]
    missing = [each for each in files if each not in sizes]
    if missing or not files:
        raise PullError(f"{spec}: the repository lacks a part of {file}: {_names(missing)}")
    return files


def _names(files: Iterable[str]) -> str:
    names = sorted(files)
    return ", ".join(names[:20]) + (f" and {len(names) - 20} more" if len(names) > 20 else "")


def _fetch(
    spec: Spec, file: str, listing: _Listing, stage: Path, before: int, total: int, report: Progress
) -> store.File:
    """Download one file into the staged model, and check it."""
    folder = stage / "download"
    folder.mkdir()
    command = [sys.executable, "-P", "-c", _DOWNLOAD, spec.repo, file, listing.revision, str(folder)]
    try:
        watch.run(
            command,
            folder,
            {"HF_HUB_DISABLE_PROGRESS_BARS": "1"},
            lambda arrived: report("download", before + min(arrived, listing.sizes[file]), total),
        )
    except watch.Failed as error:
        said = str(error)
        hint = f": {said}" if said in (_GATED, _REFUSED, _LOST) else f" ({said}); check the connection, then run again"
        raise PullError(f"{spec}: can't download {file}{hint}") from error
    target = stage / "model" / Path(file).name
    (folder / file).rename(target)
    size = target.stat().st_size
    found = store.digest(target, report, before, total)
    expected = listing.hashes.get(file, found)
    if size != listing.sizes[file] or found != expected:
        raise PullError(
            f"{spec}: {file} arrived damaged: {size:,} bytes with SHA-256 {found}, "
            f"expected {listing.sizes[file]:,} with {expected}; run the pull again"
        )
    with target.open("rb") as written:
        store.sync(written.fileno())
    shutil.rmtree(folder)
    return store.File(target.name, size, found)
