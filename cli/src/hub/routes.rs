//! The paths of the hub, as Hugging Face's clients request them.

use std::borrow::Cow;

/// What a path asks for. Repositories and revisions are as the client wrote them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Route {
    /// `/api/whoami-v2`.
    Identity,
    /// `/api/models`.
    Models,
    /// `/api/models/REPO` and `/api/models/REPO/revision/REVISION`.
    Info(Target),
    /// `/api/models/REPO/tree/REVISION`, or of a folder below it.
    Tree(Target, String),
    /// `/api/models/REPO/paths-info/REVISION`.
    Paths(Target),
    /// `/api/models/REPO/refs`.
    Refs(String),
    /// `/REPO/resolve/REVISION/FILE`.
    File(Target, String),
}

/// A repository at a revision.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Target {
    pub(super) repo: String,
    pub(super) revision: String,
}

/// The maximum length of a repository's name in a path: that of a topic, 255, with each byte encoded.
const REPO_MAX_BYTES: usize = 3 * 255;

/// Parses a path; `None` if the hub has nothing there. Where the words of a path could belong to the name of a repository
/// as well, `is_repo` decides.
pub(super) fn parse(path: &str, is_repo: impl Fn(&str) -> bool) -> Option<Route> {
    let path = path.strip_prefix('/')?;
    match path.strip_prefix("api/") {
        Some("whoami-v2") => Some(Route::Identity),
        Some("models") => Some(Route::Models),
        Some(rest) => of_repo(rest.strip_prefix("models/")?, &is_repo),
        None => of_file(path, &is_repo),
    }
}

fn of_repo(path: &str, is_repo: &impl Fn(&str) -> bool) -> Option<Route> {
    let segments: Vec<&str> = path.trim_end_matches('/').split('/').collect();
    let target = |repo: &str, revision: &str| Target { repo: repo.into(), revision: revision.into() };
    let whole = || Some(Route::Info(target(&decode(path)?, super::names::MAIN)));
    if is_repo(path) {
        return whole();
    }
    let found = split_at(&segments, &["revision", "tree", "paths-info", "refs"], is_repo);
    let Some((repo, word, rest)) = found else { return whole() };
    match (word, rest) {
        ("refs", []) => Some(Route::Refs(repo)),
        ("revision", [revision]) => Some(Route::Info(target(&repo, &decode(revision)?))),
        ("paths-info", [revision]) => Some(Route::Paths(target(&repo, &decode(revision)?))),
        ("tree", [revision, folder @ ..]) => {
            Some(Route::Tree(target(&repo, &decode(revision)?), decode(&folder.join("/"))?.into_owned()))
        }
        _ => None,
    }
}

fn of_file(path: &str, is_repo: &impl Fn(&str) -> bool) -> Option<Route> {
    let segments: Vec<&str> = path.split('/').collect();
    let (repo, _, rest) = split_at(&segments, &["resolve"], is_repo)?;
    let [revision, file @ ..] = rest else { return None };
    let target = Target { repo, revision: decode(revision)?.into_owned() };
    (!file.is_empty()).then_some(Route::File(target, decode(&file.join("/"))?.into_owned()))
}

/// Divides a path at one of `words`, the first one behind the name of a repository that exists, or else the first.
fn split_at<'p>(
    segments: &'p [&'p str],
    words: &[&str],
    is_repo: &impl Fn(&str) -> bool,
) -> Option<(String, &'p str, &'p [&'p str])> {
    let at = |index: usize| {
        let repo = decode(&segments[..index].join("/"))?.into_owned();
        Some((repo, segments[index], &segments[index + 1..]))
    };
    let ends = segments.iter().scan(0, |end, segment| {
        *end += segment.len() + 1;
        Some(*end - 1)
    });
    let repos_max = ends.take_while(|end| *end <= REPO_MAX_BYTES).count();
    let positions = (1..segments.len()).filter(|index| words.contains(&segments[*index]));
    let first = positions.clone().next()?;
    let mut near = positions.take_while(|index| *index <= repos_max);
    let known = near.find(|index| is_repo(&segments[..*index].join("/")));
    at(known.unwrap_or(first))
}

/// The value of a parameter of a query.
pub(super) fn parameter<'q>(query: &'q str, name: &str) -> Option<Cow<'q, str>> {
    let mut pairs = query.split('&').map(|pair| pair.split_once('=').unwrap_or((pair, "")));
    decode(pairs.find(|(key, _)| *key == name)?.1)
}

/// Decodes `%2F` and so on; `None` if the result is not text.
pub(super) fn decode(text: &str) -> Option<Cow<'_, str>> {
    if !text.contains('%') {
        return Some(text.into());
    }
    let mut decoded = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let [byte, after @ ..] = rest {
        rest = after;
        if *byte != b'%' {
            decoded.push(*byte);
            continue;
        }
        let digits = std::str::from_utf8(after.get(..2)?).ok()?;
        decoded.push(u8::from_str_radix(digits, 16).ok().filter(|_| !digits.starts_with('+'))?);
        rest = &after[2..];
    }
    String::from_utf8(decoded).ok().map(Cow::from)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn target(repo: &str, revision: &str) -> Target {
        Target { repo: repo.into(), revision: revision.into() }
    }

    fn of(path: &str) -> Option<Route> {
        parse(path, |repo| ["org/m", "a/b/c", "x/tree"].contains(&repo))
    }

    #[test]
    fn paths_of_the_client_are_known() {
        let file =
            |repo: &str, revision: &str, file: &str| Some(Route::File(target(repo, revision), file.into()));
        assert_eq!(of("/api/models"), Some(Route::Models));
        assert_eq!(of("/api/whoami-v2"), Some(Route::Identity));
        assert_eq!(of("/api/models/org/m"), Some(Route::Info(target("org/m", "main"))));
        assert_eq!(of("/api/models/m/revision/v3"), Some(Route::Info(target("m", "v3"))));
        assert_eq!(
            of("/api/models/org/m/tree/main"),
            Some(Route::Tree(target("org/m", "main"), String::new()))
        );
        assert_eq!(of("/api/models/m/tree/main/a/b"), Some(Route::Tree(target("m", "main"), "a/b".into())));
        assert_eq!(of("/api/models/org/m/paths-info/main"), Some(Route::Paths(target("org/m", "main"))));
        assert_eq!(of("/api/models/org/m/refs"), Some(Route::Refs("org/m".into())));
        assert_eq!(of("/org/m/resolve/ff%3A1/config.json"), file("org/m", "ff:1", "config.json"));
        assert_eq!(of("/m/resolve/main/a%20b/c"), file("m", "main", "a b/c"));
        assert_eq!(of("/a/b/c/resolve/main/f"), file("a/b/c", "main", "f"));
        assert_eq!(of("/m/resolve/main/resolve/x/y"), file("m", "main", "resolve/x/y"));
    }

    #[test]
    fn a_repository_that_exists_decides() {
        assert_eq!(of("/api/models/x/tree"), Some(Route::Info(target("x/tree", "main"))));
        assert_eq!(
            of("/api/models/x/tree/tree/v1"),
            Some(Route::Tree(target("x/tree", "v1"), String::new()))
        );
        assert_eq!(of("/api/models/y/tree/tree/v1"), Some(Route::Tree(target("y", "tree"), "v1".into())));
    }

    #[test]
    fn a_long_path_is_looked_up_a_few_times() {
        let name = "a/".repeat(127) + "a";
        let asked = std::cell::Cell::new(0);
        let is_repo = |repo: &str| {
            asked.set(asked.get() + 1);
            repo == name
        };
        let found = parse(&format!("/{name}/resolve/main/f"), is_repo);
        assert_eq!((found, asked.get()), (Some(Route::File(target(&name, "main"), "f".into())), 1));
        parse(&format!("/a{}", "/resolve".repeat(8_000)), is_repo);
        assert!(asked.get() < 100, "{} times", asked.get());
    }

    #[test]
    fn there_is_nothing_elsewhere() {
        for path in [
            "",
            "/",
            "x",
            "/api",
            "/api/",
            "/api/datasets/x",
            "/m/resolve/main",
            "/m/resolve",
            "/resolve/a/b",
        ] {
            assert_eq!(of(path), None, "{path}");
        }
        for path in ["/m/resolve/%ff/x", "/m/resolve/%/x", "/m/resolve/%+1/x", "/m/resolve/%é/x"] {
            assert_eq!(of(path), None, "{path}");
        }
    }

    #[test]
    fn parameters_are_found() {
        assert_eq!(parameter("a=1&b=x%2Fy&c", "b").as_deref(), Some("x/y"));
        assert_eq!((parameter("a=1&c", "c").as_deref(), parameter("ab=1", "a")), (Some(""), None));
    }

    proptest! {
        #[test]
        fn any_path_is_survived(path in "[/a-z%0-9é]{0,40}|/api/models/[a-z/%]{0,30}|/[a-z/]{0,5}resolve/[a-z/%]{0,20}") {
            let _ = (of(&path), parameter(&path, "a"));
        }
    }
}
