//! The programs that play the sides.

use anyhow::{Context, Result};
use std::{
    ffi::{OsStr, OsString},
    path::{Path, PathBuf},
};
use tokio::process::Command;

/// An executable, and the words that lead to its contenders' subcommands.
///
/// The harness starts itself for each side, and can do so inside of `tensor-relay-bench`, where the subcommands stand
/// first, as well as inside of `tensor-relay`, where they stand behind `bench`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Program {
    executable: PathBuf,
    lead: Vec<OsString>,
}

impl Program {
    /// This program, in which `lead` comes before our subcommands.
    ///
    /// # Errors
    /// When the system does not tell where this program is.
    pub fn current(lead: &[&str]) -> Result<Self> {
        let executable = std::env::current_exe().context("cannot find this program to start it again")?;
        Ok(Self::new(executable, lead))
    }

    /// Any other one.
    pub(crate) fn new(executable: impl Into<PathBuf>, lead: &[&str]) -> Self {
        Self { executable: executable.into(), lead: lead.iter().map(Into::into).collect() }
    }

    /// The program that `words` start, the executable first; `None` without words.
    pub fn of(words: &[OsString]) -> Option<Self> {
        let (executable, lead) = words.split_first()?;
        Some(Self { executable: executable.into(), lead: lead.to_vec() })
    }

    /// This one, with `further` words behind its lead.
    pub fn with(mut self, further: &[&str]) -> Self {
        self.lead.extend(further.iter().map(Into::into));
        self
    }

    /// The file to execute.
    pub fn executable(&self) -> &Path {
        &self.executable
    }

    /// The words before those of a subcommand.
    pub fn lead(&self) -> &[OsString] {
        &self.lead
    }

    /// A command that runs it.
    pub(crate) fn command(&self) -> Command {
        let mut command = Command::new(&self.executable);
        command.args(&self.lead);
        command
    }

    /// All words, the executable first.
    pub(crate) fn words(&self) -> impl Iterator<Item = &OsStr> {
        std::iter::once(self.executable.as_os_str()).chain(self.lead.iter().map(OsString::as_os_str))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_leads_to_a_subcommand_stands_before_it() {
        let program = Program::new("tensor-relay", &["bench"]);
        assert_eq!(program.words().collect::<Vec<_>>(), ["tensor-relay", "bench"]);
        assert!(
            Program::current(&[])
                .unwrap()
                .words()
                .eq([std::env::current_exe().unwrap().as_os_str()])
        );
    }
}
