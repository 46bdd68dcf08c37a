//! The programs that the harness starts.

use anyhow::{Context, Result};
use std::{
    ffi::{OsStr, OsString},
    path::{Path, PathBuf},
};
use tokio::process::Command;

/// An executable, and its lead: the arguments that precede our subcommands.
///
/// The harness starts its own program for each side: `tensor-relay-bench`, where subcommands come first, or
/// `tensor-relay`, where they follow `bench`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Program {
    executable: PathBuf,
    lead: Vec<OsString>,
}

impl Program {
    /// The running program, in which `lead` precedes our subcommands.
    ///
    /// # Errors
    /// When the system does not report the path of this program.
    pub fn current(lead: &[&str]) -> Result<Self> {
        let executable = std::env::current_exe().context("cannot find this program to start it again")?;
        Ok(Self::new(executable, lead))
    }

    /// The program `executable`, with `lead` before its subcommands.
    pub(crate) fn new(executable: impl Into<PathBuf>, lead: &[&str]) -> Self {
        Self { executable: executable.into(), lead: lead.iter().map(Into::into).collect() }
    }

    /// The program in the command line `words`, the executable first; `None` if it is empty.
    pub fn of(words: &[OsString]) -> Option<Self> {
        let (executable, lead) = words.split_first()?;
        Some(Self { executable: executable.into(), lead: lead.to_vec() })
    }

    /// The same program with `further` arguments appended to its lead.
    pub fn with(mut self, further: &[&str]) -> Self {
        self.lead.extend(further.iter().map(Into::into));
        self
    }

    /// The file to execute.
    pub fn executable(&self) -> &Path {
        &self.executable
    }

    /// The arguments that precede a subcommand.
    pub fn lead(&self) -> &[OsString] {
        &self.lead
    }

    /// A command that runs the program with its lead.
    pub(crate) fn command(&self) -> Command {
        let mut command = Command::new(&self.executable);
        command.args(&self.lead);
        command
    }

    /// The command line: the executable, then the lead.
    pub(crate) fn words(&self) -> impl Iterator<Item = &OsStr> {
        std::iter::once(self.executable.as_os_str()).chain(self.lead.iter().map(OsString::as_os_str))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_lead_follows_the_executable() {
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
