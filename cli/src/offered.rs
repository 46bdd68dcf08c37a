//! Messages about the files of a folder that are served and those that are skipped.

use crate::{engine_caches, units};
use tensor_relay_server::{FileKind, SkipReason, SkippedEntry, TensorFiles};

/// The messages about `files`: none for a single file, unless something is skipped.
pub(crate) fn messages(files: &TensorFiles) -> Vec<String> {
    let path = files.path().display();
    let offered = (files.kind() == FileKind::Directory).then(|| format!("{path}: {}", served_files(files)));
    let skipped = match files.skipped() {
        [] => None,
        skipped => Some(format!("{path}: not served: {}{}", join(skipped), hint(skipped))),
    };
    let caches = files
        .caches()
        .iter()
        .map(|packed| format!("{path}: {}", engine_caches::message_of(packed)));
    offered.into_iter().chain(skipped).chain(caches).collect()
}

/// The served files. Several weight files are only counted, because there may be hundreds.
fn served_files(files: &TensorFiles) -> String {
    let (weights, other_files): (Vec<_>, Vec<_>) =
        files.names().into_iter().partition(|name| name.ends_with(".safetensors"));
    let weights = match &weights[..] {
        [name] => name.clone(),
        names => units::count(names.len(), "weight file"),
    };
    let all: Vec<_> = [weights].into_iter().chain(other_files).collect();
    format!("serves {}", all.join(", "))
}

fn join(skipped: &[SkippedEntry]) -> String {
    skipped.iter().map(SkippedEntry::to_string).collect::<Vec<_>>().join(", ")
}

/// The options that would include skipped files.
fn hint(skipped: &[SkippedEntry]) -> String {
    let options = [
        (SkipReason::NotOfModel, "--all-files serves files of other names"),
        (SkipReason::LeadsOut, "--follow-links serves the targets of links"),
    ];
    let occurs = |reason| skipped.iter().any(|entry| entry.reason == reason);
    let hints = options.into_iter().filter(|(reason, _)| occurs(*reason));
    hints.map(|(_, hint)| format!("; {hint}")).collect()
}
