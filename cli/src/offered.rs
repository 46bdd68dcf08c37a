//! Messages about which files of a folder are served and which are not.

use crate::units;
use tensor_relay_server::{FileKind, LeftOut, LeftOutReason, TensorFiles};

/// The messages about `files`; none for a single file if nothing is left out.
pub(crate) fn lines(files: &TensorFiles) -> Vec<String> {
    let path = files.path().display();
    let offered = (files.kind() == FileKind::Directory).then(|| format!("{path}: {}", offered(files)));
    let left_out = match files.left_out() {
        [] => None,
        left_out => Some(format!("{path}: not served: {}{}", listed(left_out), hint(left_out))),
    };
    offered.into_iter().chain(left_out).collect()
}

/// The served files. Several weight files are only counted, because there may be hundreds.
fn offered(files: &TensorFiles) -> String {
    let (weights, other_files): (Vec<_>, Vec<_>) =
        files.names().into_iter().partition(|name| name.ends_with(".safetensors"));
    let weights = match &weights[..] {
        [name] => name.clone(),
        names => units::count(names.len(), "weight file"),
    };
    let all: Vec<_> = [weights].into_iter().chain(other_files).collect();
    format!("serves {}", all.join(", "))
}

fn listed(left_out: &[LeftOut]) -> String {
    left_out.iter().map(LeftOut::to_string).collect::<Vec<_>>().join(", ")
}

/// The options that would include some of these files.
fn hint(left_out: &[LeftOut]) -> String {
    let options = [
        (LeftOutReason::NotOfModel, "--all-files serves files of other names"),
        (LeftOutReason::LeadsOut, "--follow-links serves the targets of links"),
    ];
    let occurs = |reason| left_out.iter().any(|left| left.reason == reason);
    let hints = options.into_iter().filter(|(reason, _)| occurs(*reason));
    hints.map(|(_, hint)| format!("; {hint}")).collect()
}
