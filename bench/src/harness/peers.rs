//! Peers: programs of other projects, listed with their commands in a file.

use super::contenders::{Contender, SideCommand};
use crate::program::Program;
use anyhow::{Context, Result};
use serde::Deserialize;
use std::path::Path;

/// The content of a file that lists peers.
#[derive(Deserialize)]
struct PeerList {
    peers: Vec<Peer>,
}

/// A peer, which implements the interface of [`contender`](crate::contender).
#[derive(Deserialize)]
struct Peer {
    name: String,
    /// The executable and its first arguments. A word that is the name of a file in the list's folder means that file.
    program: Vec<String>,
    encrypted: bool,
    /// `reused` memory, or `fresh` memory in each round.
    receives_into: String,
    #[serde(default)]
    note: String,
    /// Whether it supports small messages; by default it does.
    small: Option<bool>,
}

/// Reads the peers that the file at `path` lists.
///
/// # Errors
/// When the file cannot be read, or does not list peers.
pub(crate) fn read(path: &Path) -> Result<Vec<Contender>> {
    let text = std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
    // Absolute, because both sides run in the folder of the list.
    let path = std::path::absolute(path)?;
    let folder = path.parent().unwrap_or(&path);
    parse(&text, folder).with_context(|| format!("{} does not list peers", path.display()))
}

fn parse(text: &str, folder: &Path) -> Result<Vec<Contender>> {
    let list: PeerList = serde_json::from_str(text)?;
    list.peers.into_iter().map(|peer| peer.contender(folder)).collect()
}

impl Peer {
    fn contender(self, folder: &Path) -> Result<Contender> {
        let words: Vec<String> = self.program.iter().map(|word| resolved(folder, word)).collect();
        let (executable, lead) =
            words.split_first().with_context(|| format!("{:?} has no program", self.name))?;
        let lead: Vec<&str> = lead.iter().map(String::as_str).collect();
        let program = Program::new(executable, &lead);
        let side = |side: &str| SideCommand::new(&program, &[side]);
        Ok(Contender {
            folder: Some(folder.into()),
            encrypted: self.encrypted,
            receives_into: self.receives_into,
            note: self.note,
            has_small: self.small.unwrap_or(true),
            is_ours: false,
            is_external: true,
            ..Contender::new(&self.name, side("serve"), side("receive"))
        })
    }
}

/// The path of the file called `word` in `folder`, or `word` itself if there is none.
fn resolved(folder: &Path, word: &str) -> String {
    let path = folder.join(word);
    match path.exists() {
        true => path.to_string_lossy().into_owned(),
        false => word.into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_in_the_folder_of_the_list_are_found() {
        let folder = std::env::temp_dir().join(format!("tensor-relay-bench-peers-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        std::fs::write(folder.join("zeromq.py"), "").unwrap();
        let list = r#"{"peers":[{"name":"zeromq","program":["python3","zeromq.py","--fast"],
            "encrypted":false,"receives_into":"reused","note":"1 MiB messages","small":false}]}"#;
        std::fs::write(folder.join("peers.json"), list).unwrap();
        let peers = read(&folder.join("peers.json")).unwrap();
        let script = folder.join("zeromq.py");
        let words: Vec<_> = peers[0].serve.program.words().map(|word| word.to_owned()).collect();
        std::fs::remove_dir_all(&folder).unwrap();
        assert_eq!(words, ["python3".as_ref(), script.as_os_str(), "--fast".as_ref()]);
        assert!(peers[0].is_external && !peers[0].encrypted && !peers[0].has_small);
        assert_eq!(peers[0].serve.arguments, ["serve"]);
        assert_eq!(peers[0].folder.as_deref(), Some(folder.as_path()), "its working directory");
    }

    #[test]
    fn invalid_lists_are_refused() {
        for wrong in ["", "[]", r#"{"peers":[{"name":"x"}]}"#] {
            assert!(parse(wrong, Path::new("/")).is_err(), "{wrong}");
        }
        let without_program =
            r#"{"peers":[{"name":"x","program":[],"encrypted":true,"receives_into":"fresh"}]}"#;
        assert!(
            parse(without_program, Path::new("/"))
                .unwrap_err()
                .to_string()
                .contains("\"x\" has no program")
        );
    }
}
