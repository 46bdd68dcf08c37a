//! `tensor-relay completions`: shell completion scripts.

use crate::{args::CompletionsArgs, config::variable, exit::Exit};
use clap::Command;
use std::io::Write;

pub(crate) fn run(args: &CompletionsArgs) -> anyhow::Result<Exit> {
    let mut script = vec![];
    clap_complete::generate(
        args.shell,
        &mut without_hidden_commands(&variable::command()),
        "tensor-relay",
        &mut script,
    );
    match std::io::stdout().lock().write_all(&script) {
        Ok(()) => Ok(Exit::Done),
        Err(_) => Ok(Exit::Failed),
    }
}

/// Removes hidden commands from `command`, because shells would offer them.
fn without_hidden_commands(command: &Command) -> Command {
    let mut visible = Command::new("tensor-relay").args(command.get_arguments());
    if let Some(version) = command.get_version() {
        visible = visible.version(version.to_owned());
    }
    visible.subcommands(command.get_subcommands().filter(|command| !command.is_hide_set()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::ValueEnum;
    use clap_complete::Shell;

    #[test]
    fn completion_scripts_contain_no_hidden_commands() {
        for shell in Shell::value_variants() {
            let mut script = vec![];
            clap_complete::generate(
                *shell,
                &mut without_hidden_commands(&variable::command()),
                "tensor-relay",
                &mut script,
            );
            let script = String::from_utf8(script).unwrap();
            for word in ["subscribe", "completions", "state-dir", "version"] {
                assert!(script.contains(word), "{shell}: {word}");
            }
            assert!(!script.contains("demo-producer") && !script.contains("no-json"), "{shell}");
        }
    }
}
