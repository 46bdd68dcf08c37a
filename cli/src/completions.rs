//! `tensor-relay completions`: shell completion scripts.

use crate::{args::CompletionsArgs, config::variable, exit::Exit};
use std::io::Write;

pub(crate) fn run(args: &CompletionsArgs) -> anyhow::Result<Exit> {
    let mut script = vec![];
    clap_complete::generate(args.shell, &mut variable::command(), "tensor-relay", &mut script);
    match std::io::stdout().lock().write_all(&script) {
        Ok(()) => Ok(Exit::Done),
        Err(_) => Ok(Exit::Failed),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::ValueEnum;
    use clap_complete::Shell;

    #[test]
    fn completion_scripts_contain_all_commands_but_no_hidden_options() {
        for shell in Shell::value_variants() {
            let mut script = vec![];
            clap_complete::generate(*shell, &mut variable::command(), "tensor-relay", &mut script);
            let script = String::from_utf8(script).unwrap();
            for word in ["subscribe", "completions", "state-dir", "version"] {
                assert!(script.contains(word), "{shell}: {word}");
            }
            assert!(!script.contains("no-json"), "{shell}");
        }
    }
}
