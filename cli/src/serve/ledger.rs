//! What was published under which number, kept beside the key: so that a restarted server goes on counting, and
//! subscribers that hold a version need not receive it again.

use crate::exit::message_of;
use anyhow::Context;
use serde::{Deserialize, Serialize};
use std::{
    collections::BTreeMap,
    io::Write,
    path::{Path, PathBuf},
};
use tensor_relay_client::replace_file;
use tensor_relay_server::{Epoch, Topic, Version, VersionDigest, VersionId};

/// The newest version of each topic that was served from watched files.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(crate) struct Ledger {
    #[serde(skip)]
    path: PathBuf,
    topics: BTreeMap<String, Entry>,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
struct Entry {
    epoch: String,
    version: u64,
    digest: String,
}

impl Ledger {
    /// Reads what an earlier server left in `state_dir`. Nothing there is nothing published; what cannot be read is the
    /// same, and said: the topics then begin anew.
    pub(crate) fn load(state_dir: &Path) -> Self {
        let path = state_dir.join("topics.json");
        let read = match std::fs::read(&path) {
            Ok(bytes) => serde_json::from_slice(&bytes).context("it is no list of topics"),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(Self::default()),
            Err(error) => Err(error.into()),
        };
        let known = read.unwrap_or_else(|error| {
            tracing::warn!(
                "Cannot read {}: {}. Topics begin new epochs.",
                path.display(),
                message_of(&error)
            );
            Self::default()
        });
        Self { path, ..known }
    }

    /// How content that hashes to `digest` is to be published: the version that it was, or the next one.
    pub(crate) fn place(&self, topic: &Topic, digest: VersionDigest) -> Option<(Epoch, Version)> {
        let entry = self.topics.get(topic.as_str())?;
        let epoch = Epoch(u64::from_str_radix(&entry.epoch, 16).ok()?);
        let version = Version(entry.version);
        let same = entry.digest == digest.to_string();
        Some((epoch, if same { version } else { version.next() }))
    }

    /// Notes what was published. When that cannot be written, subscribers receive the topic again after a restart.
    pub(crate) fn note(&mut self, id: &VersionId, digest: VersionDigest) {
        let entry = Entry { epoch: id.epoch.to_string(), version: id.version.0, digest: digest.to_string() };
        self.topics.insert(id.topic.as_str().to_owned(), entry);
        if let Err(error) = self.write() {
            tracing::warn!(
                "Cannot write {}: {error}. After a restart, subscribers receive {} again.",
                self.path.display(),
                id.topic
            );
        }
    }

    fn write(&self) -> std::io::Result<()> {
        replace_file(&self.path, 0o600, |file| {
            serde_json::to_writer_pretty(&mut *file, self)?;
            writeln!(file)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_go_on_after_a_restart() {
        let state = tempfile::tempdir().unwrap();
        let topic = Topic::new("t").unwrap();
        let (one, two) = (VersionDigest([1; 32]), VersionDigest([2; 32]));
        let mut ledger = Ledger::load(state.path());
        assert_eq!(ledger.place(&topic, one), None);
        let id = VersionId { topic: topic.clone(), epoch: Epoch(7), version: Version(3) };
        ledger.note(&id, one);
        let again = Ledger::load(state.path());
        assert_eq!(again.place(&topic, one), Some((Epoch(7), Version(3))));
        assert_eq!(again.place(&topic, two), Some((Epoch(7), Version(4))));
        std::fs::write(state.path().join("topics.json"), "rubbish").unwrap();
        assert_eq!(Ledger::load(state.path()).place(&topic, one), None);
    }
}
