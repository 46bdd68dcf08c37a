//! Reports of which files of a folder are served and which are not.

use crate::units;
use tensor_relay_server::{FileKind, LeftOut, LeftOutReason, TensorFiles};

/// The lines for people about `files`: none for a single file without anything beside it.
pub(crate) fn lines(files: &TensorFiles) -> Vec<String> {
    let path = files.path().display();
    let offered = (files.kind() == FileKind::Directory).then(|| format!("{path}: {}", offered(files)));
    let left_out = match files.left_out() {
        [] => None,
        left_out => Some(format!("{path}: not served: {}{}", listed(left_out), hint(left_out))),
    };
    offered.into_iter().chain(left_out).collect()
}

/// Shards are counted: there may be hundreds.
fn offered(files: &TensorFiles) -> String {
    let (weights, others): (Vec<_>, Vec<_>) =
        files.names().into_iter().partition(|name| name.ends_with(".safetensors"));
    let weights = match &weights[..] {
        [one] => one.clone(),
        many => units::count(many.len(), "weight file"),
    };
    let all: Vec<_> = [weights].into_iter().chain(others).collect();
    format!("serves {}", all.join(", "))
}

fn listed(left_out: &[LeftOut]) -> String {
    left_out.iter().map(LeftOut::to_string).collect::<Vec<_>>().join(", ")
}

/// The options that would serve some of it.
fn hint(left_out: &[LeftOut]) -> String {
    let options = [
        (LeftOutReason::NotOfModel, "--all-files serves files of other names"),
        (LeftOutReason::LeadsOut, "--follow-links what links lead to"),
    ];
    let is_some = |reason| left_out.iter().any(|left| left.reason == reason);
    let hints = options.into_iter().filter(|(reason, _)| is_some(*reason));
    hints.map(|(_, hint)| format!("; {hint}")).collect()
}
