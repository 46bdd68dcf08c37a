//! The names that clients use: repositories, revisions, commits and entity tags.
//!
//! Commits and tags follow from epoch, version and path, so that a hub needs no record of them, and hubs of one topic agree.

use tensor_relay_client::{Epoch, Version, VersionId};

/// The revision of the newest version.
pub(super) const MAIN: &str = "main";

/// The length of a repository's name, with its organisation, that Hugging Face's client accepts.
const REPO_MAX_CHARS: usize = 96;

/// What a client asks for by a revision.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Revision {
    /// The newest version.
    Main,
    /// The version with this number, of the newest version's epoch: `v12`.
    Number(Version),
    /// This version: `00000000000000ff:12`, or its commit.
    Exactly(Epoch, Version),
}

impl Revision {
    /// Parses a revision; `None` if it is none of these.
    pub(super) fn parse(text: &str) -> Option<Self> {
        if text == MAIN {
            return Some(Self::Main);
        }
        if let Some(number) = text.strip_prefix('v') {
            return version(number).map(Self::Number);
        }
        if let Some((epoch, number)) = text.split_once(':') {
            return Some(Self::Exactly(Epoch(hexadecimal(epoch)?), version(number)?));
        }
        let (epoch, rest) = (text.get(..16)?, text.get(16..)?);
        let exactly = (Epoch(hexadecimal(epoch)?), Version(hexadecimal(rest.get(..16)?)?));
        (text == commit_of(exactly.0, exactly.1)).then_some(Self::Exactly(exactly.0, exactly.1))
    }
}

/// The commit of a version: 40 hexadecimal digits, as of git. The last 8 tell it from commits of other hubs.
pub(super) fn commit(id: &VersionId) -> String {
    commit_of(id.epoch, id.version)
}

fn commit_of(epoch: Epoch, version: Version) -> String {
    let start = format!("{:016x}{:016x}", epoch.0, version.0);
    let check = blake3::hash(format!("tensor-relay commit {start}").as_bytes()).to_hex();
    format!("{start}{}", &check[..8])
}

/// The entity tag of a file, without quotes: 40 hexadecimal digits. Clients would take 64 for the SHA-256 of its content.
pub(super) fn tag(id: &VersionId, path: &str) -> String {
    let named = format!("tensor-relay file {} {}", commit(id), path);
    blake3::hash(named.as_bytes()).to_hex()[..40].to_owned()
}

/// Whether Hugging Face's client accepts this name of a repository.
pub(crate) fn is_repo_id(name: &str) -> bool {
    let is_word = |c: char| c.is_ascii_alphanumeric() || c == '_';
    let is_part = |part: &str| {
        part.starts_with(is_word)
            && part.ends_with(is_word)
            && part.chars().all(|c| is_word(c) || matches!(c, '-' | '.'))
            && !part.ends_with(".git")
    };
    let is_plain = !name.contains("--") && !name.contains("..");
    name.len() <= REPO_MAX_CHARS && is_plain && name.split('/').count() <= 2 && name.split('/').all(is_part)
}

fn version(text: &str) -> Option<Version> {
    let is_number = text.bytes().all(|byte| byte.is_ascii_digit());
    text.parse().ok().filter(|number| is_number && *number > 0).map(Version)
}

/// Sixteen hexadecimal digits, in lower case.
fn hexadecimal(text: &str) -> Option<u64> {
    let is_number = text.len() == 16 && text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'));
    u64::from_str_radix(text, 16).ok().filter(|_| is_number)
}

#[cfg(test)]
mod tests {
    use super::*;
    use tensor_relay_client::Topic;

    fn id(epoch: u64, version: u64) -> VersionId {
        VersionId { topic: Topic::new("t").unwrap(), epoch: Epoch(epoch), version: Version(version) }
    }

    #[test]
    fn a_revision_is_a_word_a_number_or_a_commit() {
        let exactly = Revision::Exactly(Epoch(255), Version(12));
        assert_eq!(Revision::parse("main"), Some(Revision::Main));
        assert_eq!(Revision::parse("v12"), Some(Revision::Number(Version(12))));
        assert_eq!(Revision::parse("00000000000000ff:12"), Some(exactly));
        assert_eq!(Revision::parse(&commit(&id(255, 12))), Some(exactly));
        let (other, upper) =
            ("0123456789abcdef0123456789abcdef01234567", commit(&id(255, 12)).to_uppercase());
        for wrong in
            ["", "Main", "v", "v0", "v-1", "v1.0", "ff:1", "00000000000000FF:1", "00000000000000ff:0"]
        {
            assert_eq!(Revision::parse(wrong), None, "{wrong}");
        }
        assert_eq!((Revision::parse(other), Revision::parse(&upper)), (None, None), "of another repository");
        assert_eq!(Revision::parse("é234567890123456é"), None);
    }

    #[test]
    fn commits_and_tags_have_forty_digits_and_differ() {
        let (one, two) = (id(1, 2), id(2, 1));
        let names = [commit(&one), commit(&two), tag(&one, "a"), tag(&one, "b"), tag(&two, "a")];
        let is_hexadecimal =
            |name: &String| name.len() == 40 && name.bytes().all(|byte| byte.is_ascii_hexdigit());
        assert!(names.iter().all(is_hexadecimal), "{names:?}");
        let distinct: std::collections::HashSet<&String> = names.iter().collect();
        assert_eq!(distinct.len(), names.len());
    }

    #[test]
    fn repositories_have_names_that_clients_accept() {
        for name in ["policy", "org/llama-3.1_8b", "a", "0/1"] {
            assert!(is_repo_id(name), "{name}");
        }
        let long = "a".repeat(97);
        for name in ["", "/", "a/", "/a", "a/b/c", "a--b", "a..b", "-a", "a.", "x.git", "a b", "ä", &long] {
            assert!(!is_repo_id(name), "{name}");
        }
    }
}
