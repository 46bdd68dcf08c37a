//! The programs that the harness starts.

use anyhow::{Context, Result};
use std::{
    convert::Infallible,
    ffi::{OsStr, OsString},
    fmt,
    path::PathBuf,
    str::FromStr,
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

/// A command line as a person writes it: words without quotes.
impl FromStr for Program {
    type Err = Infallible;

    fn from_str(text: &str) -> Result<Self, Infallible> {
        let mut words = text.split_whitespace();
        Ok(Self::new(words.next().unwrap_or_default(), &words.collect::<Vec<_>>()))
    }
}

impl fmt::Display for Program {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.words().map(OsStr::to_string_lossy).collect::<Vec<_>>().join(" "))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_lead_follows_the_executable() {
        let program = Program::new("tensor-relay", &["bench"]);
        assert_eq!(program.words().collect::<Vec<_>>(), ["tensor-relay", "bench"]);
        let remote: Program = "ssh  host-a tensor-relay bench".parse().unwrap();
        assert_eq!(remote.to_string(), "ssh host-a tensor-relay bench");
        assert!(
            Program::current(&[])
                .unwrap()
                .words()
                .eq([std::env::current_exe().unwrap().as_os_str()])
        );
    }
}
