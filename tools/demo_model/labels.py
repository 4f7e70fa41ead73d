"""Label sets of the decision prompts: names as a person would word them, and their questions.

The first name or question of each tuple is the one that evaluation uses; training draws from all.
"""

# Sections of the Debian archive that tell what a package is about.
SECTION_LABELS: dict[str, tuple[str, ...]] = {
    "games": ("games", "game", "games and amusements", "entertainment"),
    "graphics": ("graphics", "images and graphics", "pictures"),
    "sound": ("sound", "audio", "music and sound"),
    "mail": ("mail", "email", "electronic mail"),
    "database": ("database", "databases", "data storage and queries"),
    "science": ("science", "scientific software", "research"),
    "net": ("networking", "network", "network tools", "internet"),
    "web": ("web", "web software", "world wide web"),
    "editors": ("text editors", "editors", "editing text"),
    "math": ("mathematics", "math", "numbers and mathematics"),
    "video": ("video", "film and video", "moving pictures"),
    "fonts": ("fonts", "typefaces"),
    "electronics": ("electronics", "circuits and electronics"),
    "hamradio": ("ham radio", "amateur radio"),
    "text": ("text processing", "working with text"),
    "admin": ("system administration", "administration"),
    "utils": ("utilities", "small tools"),
    "devel": ("software development", "development", "programming tools"),
    "libdevel": ("library development files", "development headers"),
    "libs": ("libraries", "shared libraries"),
    "doc": ("documentation", "manuals"),
    "perl": ("Perl", "the Perl language"),
    "python": ("Python", "the Python language"),
    "ruby": ("Ruby", "the Ruby language"),
    "java": ("Java", "the Java language"),
    "javascript": ("JavaScript", "the JavaScript language"),
    "golang": ("Go", "the Go language"),
    "rust": ("Rust", "the Rust language"),
    "haskell": ("Haskell", "the Haskell language"),
    "php": ("PHP", "the PHP language"),
    "lisp": ("Lisp", "the Lisp language"),
    "ocaml": ("OCaml", "the OCaml language"),
    "gnu-r": ("R", "the R language", "statistics with R"),
    "vcs": ("version control", "version control systems"),
    "tex": ("TeX", "typesetting with TeX"),
    "x11": ("X window system", "graphical desktop"),
    "gnome": ("GNOME", "the GNOME desktop"),
    "kde": ("KDE", "the KDE desktop"),
    "comm": ("communication", "telephony and modems"),
    "localization": ("translations", "language support"),
    "shells": ("shells", "command shells"),
    "kernel": ("kernel", "the operating system kernel"),
}
TESTED_SECTIONS = (
    "games", "graphics", "sound", "mail", "database", "science", "net", "web", "editors", "math",
)  # fmt: skip
SECTION_QUESTIONS = (
    "Which section does this package belong to?",
    "Which category fits this software best?",
    "What is this package about?",
    "Where would you file this software?",
    "Pick the best label for this description.",
    "What is the topic of this text?",
)
SECTION_CLAIMS = (
    "Does this package belong to the section {}?",
    "Is this software about {}?",
    "Would you file this package under {}?",
    "Is the topic of this text {}?",
)

# Noun categories of WordNet.
CATEGORY_LABELS: dict[str, tuple[str, ...]] = {
    "noun.animal": ("animal", "animals", "an animal"),
    "noun.plant": ("plant", "plants", "a plant"),
    "noun.food": ("food", "food or drink"),
    "noun.body": ("body part", "part of the body"),
    "noun.artifact": ("man-made object", "artifact", "a thing that people make"),
    "noun.person": ("person", "people", "a person"),
    "noun.location": ("place", "location", "a place"),
    "noun.feeling": ("feeling", "emotion", "a feeling"),
    "noun.substance": ("substance", "material", "a substance"),
    "noun.communication": ("communication", "language or message"),
    "noun.event": ("event", "something that happens"),
    "noun.time": ("time", "a time or period"),
    "noun.quantity": ("quantity", "an amount"),
    "noun.group": ("group", "a group of people or things"),
    "noun.possession": ("possession", "money or property"),
    "noun.shape": ("shape", "a shape"),
    "noun.phenomenon": ("natural phenomenon", "phenomenon"),
    "noun.act": ("act", "action", "something that is done"),
    "noun.cognition": ("idea", "knowledge", "thought"),
    "noun.state": ("state", "condition"),
    "noun.attribute": ("attribute", "quality", "property"),
    "noun.object": ("natural object", "a thing found in nature"),
}
TESTED_CATEGORIES = (
    "noun.animal", "noun.plant", "noun.food", "noun.body", "noun.artifact", "noun.person",
    "noun.location", "noun.feeling", "noun.substance", "noun.communication", "noun.time",
    "noun.group",
)  # fmt: skip
CATEGORY_QUESTIONS = (
    "Which category does this word belong to?",
    "What is this?",
    "What does the definition describe?",
    "Which label fits this entry best?",
)
CATEGORY_CLAIMS = ("Is this {}?", "Does this word name {}?", "Does the definition describe {}?")

# Facets of debtags: (question of a choice, claim of a yes/no). `use` is held out for evaluation.
FACETS: dict[str, tuple[str, str]] = {
    "interface": ("What kind of interface does this software have?",
                  "Does this software have a {} interface?"),
    "implemented-in": ("Which language is this software written in?",
                       "Is this software written in {}?"),
    "works-with": ("What does this software work with?", "Does this software work with {}?"),
    "works-with-format": ("Which format does this software handle?",
                          "Does this software handle the format {}?"),
    "role": ("What is the role of this package?", "Is the role of this package {}?"),
    "field": ("Which field is this software for?", "Is this software for the field of {}?"),
    "game": ("What kind of game is this?", "Is this a {} game?"),
    "network": ("What is the network role of this software?",
                "Is the network role of this software {}?"),
    "protocol": ("Which protocol does this software speak?", "Does this software speak {}?"),
    "uitoolkit": ("Which toolkit draws the interface?", "Is the interface drawn with {}?"),
    "devel": ("Which kind of development is this for?", "Is this for {} in development?"),
    "admin": ("Which administration task is this for?", "Is this for the task of {}?"),
    "sound": ("What does this audio software do?", "Is this audio software a {}?"),
    "hardware": ("Which hardware is this about?", "Is this about {} hardware?"),
    "security": ("Which area of security is this for?", "Is this for {} in security?"),
    "made-of": ("What is this package made of?", "Is this package made of {}?"),
    "suite": ("Which software suite does this belong to?", "Does this belong to the suite {}?"),
    "mail": ("What is the role of this mail software?", "Is this mail software for {}?"),
    "web": ("What kind of web software is this?", "Is this a web {}?"),
    "x11": ("What is the X window role of this software?", "Is this an X window {}?"),
    "scope": ("How large is this software?", "Is this a {}?"),
    "culture": ("Which culture is this for?", "Is this for {} culture?"),
    "science": ("What does this science software do?", "Is this science software for {}?"),
    "accessibility": ("Which accessibility need is this for?", "Does this help with {}?"),
}  # fmt: skip
HELD_OUT_FACET = ("use", "What is this software used for?", "Is this software used for {}?")
TESTED_TAGS = (
    "interface::commandline", "interface::graphical", "works-with::text", "works-with::audio",
    "implemented-in::c", "implemented-in::python", "role::shared-lib", "role::program",
    "network::client", "network::server",
)  # fmt: skip
TAG_WORDS = {"c++": "C++", "commandline": "command line", "shared-lib": "shared library",
             "devel-lib": "development library", "app-data": "application data", "db": "databases",
             "vcs": "version control", "pim": "personal information", "ip": "IP",
             "3d": "3D", "sdl": "SDL", "gtk": "GTK", "qt": "Qt", "x11": "X11"}  # fmt: skip


def tag_label(tag: str) -> str:
    """Word the value of a debtag: `works-with::software:source` becomes `source software`."""
    value = tag.split("::")[1]
    words = [TAG_WORDS.get(part, part.replace("-", " ")) for part in value.split(":")]
    return " ".join(reversed(words)).removeprefix("TODO").strip()


VALENCE_LEVELS = ("very negative", "negative", "neutral", "positive", "very positive")
VALENCE_BOUNDS = (-2.2, -1.0, 1.0, 2.2)  # ratings between the levels


def valence_level(rating: float) -> int:
    """Return the level 0..4 of a rating."""
    return sum(rating > bound for bound in VALENCE_BOUNDS)
