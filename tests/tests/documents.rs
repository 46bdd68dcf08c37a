//! Checks of the documents: links resolve, named tests and constants exist, and pages stay short.

use std::{
    fs,
    path::{Path, PathBuf},
};

/// The prefix of links within the repository on pages that are published elsewhere, e.g. in a package index.
const REPOSITORY_URL: &str = "https://github.com/tensor-relay/tensor-relay/blob/main/";

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

fn read(path: &Path) -> String {
    fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// All files below `dir` whose names end with `ending`, without build outputs and hidden folders.
fn files_below(dir: &Path, ending: &str) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in fs::read_dir(dir).expect("a folder of the repository") {
        let path = entry.expect("an entry of a folder").path();
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        if name.starts_with('.') || name.starts_with("target") || path.is_symlink() {
            continue;
        }
        match path.is_dir() {
            true => found.extend(files_below(&path, ending)),
            false if name.ends_with(ending) => found.push(path),
            false => {}
        }
    }
    found
}

/// The text of a page without its blocks of code.
fn prose(text: &str) -> String {
    text.split("```").step_by(2).collect()
}

/// The targets of a page's links: `](TARGET)`.
fn links(text: &str) -> impl Iterator<Item = &str> {
    text.split("](")
        .skip(1)
        .filter_map(|rest| rest.split_once(')'))
        .map(|(target, _)| target)
}

/// The anchors that GitHub derives from a page's headings.
fn anchors(text: &str) -> Vec<String> {
    let headings = prose(text);
    let anchor = |heading: &str| -> String {
        let heading = heading.trim_start_matches('#').trim().to_lowercase();
        let kept = heading.chars().filter(|c| c.is_alphanumeric() || " -_".contains(*c));
        kept.map(|c| if c == ' ' { '-' } else { c }).collect()
    };
    headings.lines().filter(|line| line.starts_with('#')).map(anchor).collect()
}

/// The error of a link on `page`, if it is broken.
fn link_error(page: &Path, text: &str, target: &str) -> Option<String> {
    let in_repository = target.strip_prefix(REPOSITORY_URL).map(|rest| (root(), rest));
    if in_repository.is_none() && (target.contains("://") || target.starts_with("mailto:")) {
        return None;
    }
    let (base, target) = in_repository.unwrap_or_else(|| (page.with_file_name(""), target));
    let (path, anchor) = target.split_once('#').unwrap_or((target, ""));
    let file = base.join(path);
    if !path.is_empty() && !file.exists() {
        return Some(format!("{} has no {path}", page.display()));
    }
    let page_anchors = match path.is_empty() {
        true => anchors(text),
        false if path.ends_with(".md") => anchors(&read(&file)),
        false => return None,
    };
    let has_anchor = anchor.is_empty() || page_anchors.iter().any(|name| name == anchor);
    (!has_anchor).then(|| format!("{}: {path} has no heading #{anchor}", page.display()))
}

#[test]
fn links_resolve() {
    let mut errors = Vec::new();
    for page in files_below(&root(), ".md") {
        let text = read(&page);
        errors.extend(links(&prose(&text)).filter_map(|target| link_error(&page, &text, target)));
    }
    assert!(errors.is_empty(), "{errors:#?}");
}

/// Each test that ARCHITECTURE.md, docs/promises.md and docs/deadlines.md name with its folder exists:
/// `processes/shutdown::NAME` is a function in tests/tests/processes/shutdown.rs, or in a file of the folder
/// tests/tests/processes/shutdown.
#[test]
fn tests_that_are_named_exist() {
    let mut missing = Vec::new();
    for page in ["ARCHITECTURE.md", "docs/promises.md", "docs/deadlines.md"] {
        let text = read(&root().join(page));
        for (place, function) in text.split('`').skip(1).step_by(2).filter_map(|word| word.split_once("::")) {
            let Some(("sim" | "hostile" | "processes" | "transport" | "cuda", _)) = place.split_once('/')
            else {
                continue;
            };
            if function == "f" {
                continue; // A placeholder for any test.
            }
            let module = root().join("tests/tests").join(place);
            let mut files = vec![module.with_extension("rs")];
            files.extend(module.is_dir().then(|| files_below(&module, ".rs")).into_iter().flatten());
            let wanted = format!("fn {function}(");
            if !files
                .iter()
                .any(|file| fs::read_to_string(file).is_ok_and(|code| code.contains(&wanted)))
            {
                missing.push(format!("{page}: {place}::{function}"));
            }
        }
    }
    assert!(missing.is_empty(), "{missing:#?}");
}

/// The path of a source file from its short form in docs/deadlines.md: `client/backoff.rs` is client/src/backoff.rs.
fn source_file(file: &str) -> PathBuf {
    let (component, path) = file.split_once('/').unwrap_or_default();
    let folder = if path.ends_with(".py") { "python" } else { "src" };
    root().join(component).join(folder).join(path)
}

/// The errors in a table row of docs/deadlines.md: constants without a file, files that do not exist, and constants
/// that their file lacks. Its third column has groups of constants and files, separated by semicolons.
fn constant_errors(row: &str) -> Vec<String> {
    let mut errors = Vec::new();
    for group in row.split('|').nth(3).unwrap_or_default().split(';') {
        let names: Vec<&str> = group.split('`').skip(1).step_by(2).collect();
        let is_constant = |name: &&&str| name.bytes().all(|byte| byte.is_ascii_uppercase() || byte == b'_');
        let constants: Vec<&str> = names.iter().filter(is_constant).copied().collect();
        let files = names.iter().filter(|name| name.ends_with(".rs") || name.ends_with(".py"));
        if !constants.is_empty() && files.clone().next().is_none() {
            errors.push(format!("{constants:?} without a file in the row {row}"));
        }
        for file in files {
            let code = fs::read_to_string(source_file(file)).unwrap_or_default();
            let is_defined = |name: &str| {
                code.contains(&format!("const {name}:")) || code.contains(&format!("\n{name} ="))
            };
            if code.is_empty() {
                errors.push(format!("there is no file {file}, in the row {row}"));
            } else if let Some(name) = constants.iter().find(|name| !is_defined(name)) {
                errors.push(format!("{file} has no constant {name}, in the row {row}"));
            }
        }
    }
    errors
}

#[test]
fn constants_of_deadlines_exist() {
    let page = read(&root().join("docs/deadlines.md"));
    let errors: Vec<String> = page
        .lines()
        .filter(|line| line.starts_with('|'))
        .flat_map(constant_errors)
        .collect();
    assert!(errors.is_empty(), "docs/deadlines.md: {errors:#?}");

    for wrong in
        ["`NO_SUCH_TIMEOUT`, `client/client.rs`", "`PROBE_TIMEOUT`, `client/x.rs`", "`PROBE_TIMEOUT`"]
    {
        assert_eq!(constant_errors(&format!("| a wait | 1 s | {wrong} |")).len(), 1, "{wrong}");
    }
}

#[test]
fn pages_are_short() {
    let mut pages = vec![(root().join("README.md"), 7), (root().join("python/README.md"), 7)];
    pages.push((root().join("ARCHITECTURE.md"), 16));
    pages.extend(files_below(&root().join("docs"), ".md").into_iter().map(|page| (page, 8)));
    for (page, kib) in pages {
        let bytes = read(&page).len();
        assert!(bytes <= kib << 10, "{} has {bytes} bytes, more than {kib} KiB", page.display());
    }
}

/// The seconds of a sleep whose length is in the line: `sleep(Duration::from_millis(20))`, or `time.sleep(0.3)`.
fn slept_s(line: &str) -> f64 {
    let Some((_, argument)) = line.split_once("sleep(") else { return 0.0 };
    let (argument, unit_s) = match argument.split_once("Duration::from_") {
        Some((_, duration)) if duration.starts_with("millis(") => (&duration["millis(".len()..], 1e-3),
        Some((_, duration)) if duration.starts_with("secs(") => (&duration["secs(".len()..], 1.0),
        _ => (argument, 1.0),
    };
    let number: String = argument.chars().take_while(|c| c.is_ascii_digit() || *c == '.').collect();
    number.parse::<f64>().map_or(0.0, |number| number * unit_s)
}

/// Goal: tests of whole processes wait for what they need, and not for time. Method: the sum of all sleeps of literal
/// length in the tests whose time is real; those of a loop that polls count once.
#[test]
fn tests_hardly_sleep() {
    for (line, expected_s) in [
        ("thread::sleep(Duration::from_millis(20));", 0.02),
        ("tokio::time::sleep(std::time::Duration::from_secs(3)).await;", 3.0),
        ("    time.sleep(0.3)  # Until the call blocks.", 0.3),
        ("thread::sleep(POLL_INTERVAL);", 0.0),
    ] {
        assert!((slept_s(line) - expected_s).abs() < 1e-9, "{line}");
    }
    let in_real_time = ["tests/tests/processes", "tests/tests/cuda", "tests/src/processes", "python/tests"];
    let files = in_real_time.iter().flat_map(|dir| {
        let dir = root().join(dir);
        [files_below(&dir, ".rs"), files_below(&dir, ".py")].concat()
    });
    let mut sleeps: Vec<(f64, String)> = Vec::new();
    for file in files {
        for line in read(&file).lines().filter(|line| slept_s(line) > 0.0) {
            sleeps.push((slept_s(line), format!("{}: {}", file.display(), line.trim())));
        }
    }
    let total_s: f64 = sleeps.iter().map(|(slept_s, _)| slept_s).sum();
    sleeps.sort_by(|(one, _), (other, _)| other.total_cmp(one));
    assert!(total_s < 15.0, "{total_s} s, the longest first: {:#?}", &sleeps[..10.min(sleeps.len())]);
}
