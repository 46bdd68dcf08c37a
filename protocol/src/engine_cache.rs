//! Caches of inference engines beside a model (FILES.md §13.5): their names, where engines keep them, the facts that
//! they depend on, and the paths in an archive.
//!
//! What an engine compiled on one machine is right on another one only if the two agree in what the compiler saw. The
//! archive carries these facts, and the receiver compares them with its own before it unpacks.

use crate::files::FileName;
use serde::{Deserialize, Serialize};
use std::{
    collections::BTreeMap,
    fmt,
    path::{Path, PathBuf},
    str::FromStr,
};

/// The ending of an archive's file name, after the name of its cache.
pub const ARCHIVE_EXTENSION: &str = ".engine-cache.tar";

/// The first entry of an archive: its [`Facts`], as JSON.
pub const FACTS_ENTRY: &str = "tensor-relay-facts.json";

/// The maximum size of that entry.
pub const FACTS_MAX_BYTES: u64 = 64 << 10;

/// The maximum size of all archives of a version: several times the caches of today's largest models.
pub const ARCHIVES_MAX_BYTES: u64 = 4 << 30;

/// The maximum number of files in an archive: the caches of engines have thousands.
pub const ARCHIVE_FILES_MAX: usize = 262_144;

/// The fact that names the folder of a cache. Triton and vLLM write absolute paths into their entries, so a cache hits
/// only in a folder of the same path.
pub const FOLDER_FACT: &str = "folder";

/// A value that every value of the other end agrees with.
pub const ANY_VALUE: &str = "*";

/// Names that begin so belong to a receiver that unpacks.
pub const WORKING_PREFIX: &str = ".tensor-relay";

/// The name of a cache: 1 to 64 of `a` to `z`, `0` to `9`, `-` and `_`.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct CacheName(Box<str>);

impl CacheName {
    /// The name as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// The name of the cache's archive.
    pub fn archive(&self) -> FileName {
        FileName::new(&format!("{self}{ARCHIVE_EXTENSION}"))
            .expect("82 bytes at most, without a slash or a dot first")
    }

    /// The folder in which the engine of this name looks, by `variable`, which reads the environment; `None` if the
    /// engine is not known, or without `HOME` (for `inductor`, without `USER`).
    pub fn folder(&self, variable: impl Fn(&str) -> Option<String>) -> Option<PathBuf> {
        let set = |name: &str| variable(name).filter(|value| !value.is_empty()).map(PathBuf::from);
        let home = |below: &str| set("HOME").map(|home| home.join(below));
        match &*self.0 {
            // Not the whole root: it also has what vLLM measured of this machine's GPUs.
            "vllm" => {
                let user = || set("XDG_CACHE_HOME").or_else(|| home(".cache"));
                let root = set("VLLM_CACHE_ROOT").or_else(|| user().map(|root| root.join("vllm")));
                root.map(|root| root.join("torch_compile_cache"))
            }
            "triton" => set("TRITON_CACHE_DIR").or_else(|| {
                let root = set("TRITON_HOME").or_else(|| set("HOME"));
                root.map(|root| root.join(".triton/cache"))
            }),
            "inductor" => set("TORCHINDUCTOR_CACHE_DIR").or_else(|| {
                let temporary = set("TMPDIR").unwrap_or_else(|| "/tmp".into());
                let user = ["LOGNAME", "USER", "LNAME", "USERNAME"].into_iter().find_map(&set)?;
                Some(temporary.join(format!("torchinductor_{}", user.display())))
            }),
            _ => None,
        }
    }
}

impl FromStr for CacheName {
    type Err = CacheError;

    fn from_str(name: &str) -> Result<Self, CacheError> {
        let is_allowed = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || "-_".contains(c);
        match (1..=64).contains(&name.len()) && name.chars().all(is_allowed) {
            true => Ok(Self(name.into())),
            false => Err(CacheError::Name(name.into())),
        }
    }
}

impl fmt::Display for CacheName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Whether a file of this name is the archive of a cache.
pub fn is_archive(name: &str) -> bool {
    name.strip_suffix(ARCHIVE_EXTENSION)
        .is_some_and(|name| name.parse::<CacheName>().is_ok())
}

/// A cache, and the folder in which an engine looks for it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EngineCache {
    /// The name by which both ends know it.
    pub name: CacheName,
    /// The folder, absolute.
    pub folder: PathBuf,
}

impl EngineCache {
    /// Parses `NAME` of a known engine, or `NAME=FOLDER`. `variable` reads the environment; `~/` stands for its `HOME`.
    ///
    /// # Errors
    /// [`CacheError`] for a wrong name, and for a folder that is not absolute or not known.
    pub fn parse(text: &str, variable: impl Fn(&str) -> Option<String>) -> Result<Self, CacheError> {
        let (name, folder) = match text.split_once('=') {
            Some((name, folder)) => (name, Some(folder)),
            None => (text, None),
        };
        let name: CacheName = name.parse()?;
        let folder = match folder.map(|folder| (folder, folder.strip_prefix("~/"))) {
            None => name.folder(variable),
            Some((_, Some(below))) => variable("HOME").map(|home| Path::new(&home).join(below)),
            Some((folder, None)) => Some(folder.into()),
        };
        match folder {
            None => Err(CacheError::NoFolder(name)),
            Some(folder) if !folder.is_absolute() => Err(CacheError::RelativeFolder(folder)),
            Some(folder) => Ok(Self { name, folder }),
        }
    }
}

/// Why the name or the folder of a cache is refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CacheError {
    /// An invalid name.
    #[error("{0:?} is not the name of a cache: 1 to 64 of a-z, 0-9, - and _, e.g. vllm")]
    Name(Box<str>),
    /// A name without a folder, which is not known.
    #[error(
        "where the cache {0} lies is not known: name its folder, e.g. {0}=~/.cache/{0} (known without a folder are \
         vllm, inductor and triton, by the variables of their engines)"
    )]
    NoFolder(CacheName),
    /// A folder that depends on the current one.
    #[error("the folder {} of a cache is not absolute: engines write its path into their entries", .0.display())]
    RelativeFolder(PathBuf),
}

/// What the code in a cache depends on, by name: `gpu`, `driver`, `torch` and so on.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Facts(BTreeMap<String, String>);

impl Facts {
    /// A value that no value of the other end agrees with but [`ANY_VALUE`]: of what could not be found out.
    pub const UNKNOWN: &'static str = "unknown";

    /// Reads facts from JSON: an object of texts.
    ///
    /// # Errors
    /// The parser's error.
    pub fn parse(json: &[u8]) -> Result<Self, serde_json::Error> {
        serde_json::from_slice(json)
    }

    /// The facts as JSON, the same for the same facts.
    pub fn to_json(&self) -> Vec<u8> {
        serde_json::to_vec_pretty(self).expect("texts can be written as JSON")
    }

    /// The value of a fact.
    pub fn get(&self, fact: &str) -> Option<&str> {
        self.0.get(fact).map(String::as_str)
    }

    /// Sets a fact.
    pub fn set(&mut self, fact: impl Into<String>, value: impl Into<String>) {
        self.0.insert(fact.into(), value.into());
    }

    /// These facts, with the folder of a cache unless one is stated.
    #[must_use]
    pub fn with_folder(&self, folder: &Path) -> Self {
        let mut facts = self.clone();
        let stated = facts.0.entry(FOLDER_FACT.to_owned());
        stated.or_insert_with(|| folder.display().to_string());
        facts
    }

    /// The facts of an archive that do not hold here, with both values. A fact that is not known here does not hold;
    /// one that the archive lacks is not compared.
    pub fn differences(&self, here: &Self) -> Vec<Difference> {
        let differs = |(fact, there): (&String, &String)| match here.get(fact) {
            Some(here) if agree(fact, there, here) => None,
            here => {
                Some(Difference { fact: fact.clone(), there: there.clone(), here: here.map(str::to_owned) })
            }
        };
        self.0.iter().filter_map(differs).collect()
    }
}

/// Whether two values of a fact agree. Folders agree if their names do, whatever slashes are between and after these.
fn agree(fact: &str, there: &str, here: &str) -> bool {
    match there == ANY_VALUE || here == ANY_VALUE {
        true => true,
        false if [there, here].contains(&Facts::UNKNOWN) => false,
        false if fact == FOLDER_FACT => Path::new(there) == Path::new(here),
        false => there == here,
    }
}

impl Extend<(String, String)> for Facts {
    fn extend<T: IntoIterator<Item = (String, String)>>(&mut self, facts: T) {
        self.0.extend(facts);
    }
}

impl IntoIterator for Facts {
    type Item = (String, String);
    type IntoIter = std::collections::btree_map::IntoIter<String, String>;

    fn into_iter(self) -> Self::IntoIter {
        self.0.into_iter()
    }
}

/// A fact of an archive that does not hold here.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Difference {
    /// The fact's name.
    pub fact: String,
    /// Its value where the cache was filled.
    pub there: String,
    /// Its value here, if it is known.
    pub here: Option<String>,
}

impl fmt::Display for Difference {
    /// With escapes: the archive comes from a peer.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { fact, there, here } = self;
        let (fact, there) = (fact.escape_debug(), there.escape_debug());
        match here {
            Some(here) => write!(f, "{fact}: {there} there, {} here", here.escape_debug()),
            None => write!(f, "{fact}: {there} there, not known here"),
        }
    }
}

/// Why an entry of an archive is refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("the entry {path:?} is refused: {why}")]
pub struct EntryError {
    /// The path.
    pub path: Box<str>,
    /// The rule that it breaks.
    pub why: &'static str,
}

/// The maximum length of a path in an archive.
const PATH_MAX_BYTES: usize = 4_096;

/// Checks the path of an entry: names without control characters, joined by `/`, that lead below the folder.
///
/// # Errors
/// [`EntryError`] names the rule that it breaks.
pub fn check_entry(path: &[u8]) -> Result<&Path, EntryError> {
    let refuse = |why| EntryError { path: String::from_utf8_lossy(path).into(), why };
    let text = str::from_utf8(path).map_err(|_| refuse("it is not UTF-8"))?;
    let segment = |segment: &str| match segment {
        "" => Some("it is absolute, or has an empty name"),
        "." | ".." => Some("it has a name of dots"),
        _ if segment.len() > 255 => Some("it has a name of more than 255 bytes"),
        _ if segment.contains(char::is_control) => Some("it has control characters"),
        _ => None,
    };
    match text.split('/').find_map(segment) {
        _ if text.len() > PATH_MAX_BYTES => Err(refuse("it is longer than 4096 bytes")),
        _ if text.starts_with(WORKING_PREFIX) => Err(refuse("its name is reserved")),
        Some(why) => Err(refuse(why)),
        None => Ok(Path::new(text)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn environment(set: &[(&str, &str)]) -> impl Fn(&str) -> Option<String> {
        let set: Vec<(String, String)> = set.iter().map(|(k, v)| ((*k).into(), (*v).into())).collect();
        move |name| set.iter().find(|(key, _)| key == name).map(|(_, value)| value.clone())
    }

    #[test]
    fn engines_look_in_the_folders_of_their_variables() {
        let folder = |text: &str, set: &[(&str, &str)]| {
            EngineCache::parse(text, environment(set)).map(|cache| cache.folder.display().to_string())
        };
        for (text, set, expected) in [
            ("vllm", &[("HOME", "/h")][..], "/h/.cache/vllm/torch_compile_cache"),
            ("vllm", &[("HOME", "/h"), ("XDG_CACHE_HOME", "/x")], "/x/vllm/torch_compile_cache"),
            ("vllm", &[("VLLM_CACHE_ROOT", "/v"), ("HOME", "/h")], "/v/torch_compile_cache"),
            ("triton", &[("HOME", "/h"), ("TRITON_CACHE_DIR", "")], "/h/.triton/cache"),
            ("triton", &[("HOME", "/h"), ("TRITON_HOME", "/t")], "/t/.triton/cache"),
            ("triton", &[("TRITON_CACHE_DIR", "/c"), ("HOME", "/h")], "/c"),
            ("inductor", &[("USER", "u")], "/tmp/torchinductor_u"),
            ("inductor", &[("USER", "u"), ("TMPDIR", "/t")], "/t/torchinductor_u"),
            ("inductor", &[("TORCHINDUCTOR_CACHE_DIR", "/c")], "/c"),
            ("jit=~/a=b", &[("HOME", "/h")], "/h/a=b"),
            ("jit=/c", &[], "/c"),
        ] {
            assert_eq!(folder(text, set).as_deref(), Ok(expected), "{text}");
        }
        assert!(matches!(folder("vllm", &[]), Err(CacheError::NoFolder(_))));
        assert!(matches!(folder("jit", &[("HOME", "/h")]), Err(CacheError::NoFolder(_))));
        assert!(matches!(folder("jit=c", &[]), Err(CacheError::RelativeFolder(_))));
        for wrong in ["", "=/c", "../x=/c", "a/b=/c", "A=/c", &"a".repeat(65)] {
            assert!(matches!(folder(wrong, &[]), Err(CacheError::Name(_))), "{wrong}");
        }
    }

    #[test]
    fn archives_are_side_files_by_name() {
        let name: CacheName = "vllm".parse().unwrap();
        assert_eq!(name.archive().as_str(), "vllm.engine-cache.tar");
        assert!(is_archive("vllm.engine-cache.tar"));
        for other in [".engine-cache.tar", "vllm.tar", "a/b.engine-cache.tar", "vllm.engine-cache.tar.gz"] {
            assert!(!is_archive(other), "{other}");
        }
        let longest: CacheName = "a".repeat(64).parse().unwrap();
        assert!(crate::files::side_file_spec(&longest.archive(), 1).is_ok());
    }

    #[test]
    fn a_fact_that_differs_is_named_with_both_values() {
        let facts = |entries: &[(&str, &str)]| {
            let mut facts = Facts::default();
            facts.extend(entries.iter().map(|(fact, value)| ((*fact).into(), (*value).into())));
            facts
        };
        let there = facts(&[("driver", "550"), ("gpu", "H100"), ("torch", "2.9")]);
        assert_eq!(Facts::parse(&there.to_json()).unwrap(), there);
        assert_eq!(
            there.differences(&facts(&[("driver", "550"), ("gpu", "H100"), ("torch", "2.9"), ("x", "y")])),
            []
        );
        let text = |here: &[(&str, &str)]| {
            let all: Vec<String> = there.differences(&facts(here)).iter().map(ToString::to_string).collect();
            all.join("; ")
        };
        assert_eq!(
            text(&[("driver", "*"), ("gpu", "H200\u{1b}")]),
            "gpu: H100 there, H200\\u{1b} here; torch: 2.9 there, not known here"
        );
        let stated = facts(&[(FOLDER_FACT, ANY_VALUE)]);
        assert_eq!(stated.with_folder(Path::new("/x")), stated);
        for (there, here, agrees) in [
            ("/c", "/c/", true),
            ("/c//k/./", "/c/k", true),
            ("/c", "/c/k", false),
            ("/c/../d", "/d", false),
            (Facts::UNKNOWN, Facts::UNKNOWN, false),
            (Facts::UNKNOWN, ANY_VALUE, true),
        ] {
            let differences = facts(&[(FOLDER_FACT, there)]).differences(&facts(&[(FOLDER_FACT, here)]));
            assert_eq!(differences.is_empty(), agrees, "{there} {here}");
        }
        for wrong in [&b""[..], b"[]", b"{\"a\":1}", b"{\"a\":\"b\"} x"] {
            assert!(Facts::parse(wrong).is_err());
        }
    }

    #[test]
    fn hostile_paths_are_refused() {
        for good in ["a", "ab/cd/kernel.so", ".cache_ready", "a/.tensor-relay", "a b/ü"] {
            assert_eq!(check_entry(good.as_bytes()).unwrap(), Path::new(good));
        }
        let (long, deep) = ("n".repeat(256), "d/".repeat(2_100));
        for wrong in [
            "",
            "/etc/passwd",
            "../x",
            "a/../b",
            "a//b",
            "a/",
            "./a",
            "a/.",
            "a\nb",
            ".tensor-relay.x",
            &long,
            &deep,
        ] {
            assert!(check_entry(wrong.as_bytes()).is_err(), "{wrong:?}");
        }
        assert!(check_entry(b"a\xff").is_err() && check_entry(b"a\0b").is_err());
    }

    proptest! {
        /// A folder joined with any path that is accepted is below that folder.
        #[test]
        fn an_entry_stays_below_its_folder(path in "[a./\\\\\0-]{0,12}") {
            if let Ok(path) = check_entry(path.as_bytes()) {
                prop_assert!(path.components().all(|part| matches!(part, std::path::Component::Normal(_))));
            }
        }
    }
}
