//! The environment variables, one for each flag.

use crate::args::{Args, GLOBAL_HEADING};
use clap::{Arg, ArgAction, Command, CommandFactory, ValueHint, builder::BoolishValueParser, value_parser};
use std::{ffi::OsString, path::PathBuf};

/// The id of the flag that names the file.
pub(super) const FILE: &str = "config-file";

/// The prefix of all variables.
const PREFIX: &str = "TENSOR_RELAY_";

/// The flags without variables, because they concern a single run.
const WITHOUT_VARIABLE: [&str; 3] = ["help", "version", "verbose"];

/// The command whose flags have no variables, because its command line must describe a measurement completely.
pub(crate) const BENCH: &str = "bench";

/// The command line of `args.rs`, with `--config` for all commands and a variable for each flag, except flags of
/// [`BENCH`].
pub(crate) fn command() -> Command {
    with_variables(Args::command().arg(file_flag()))
}

/// The variable's value. An empty value counts as unset, because a Dockerfile can empty a variable but not remove it.
pub(crate) fn value_of(variable: &str) -> Option<OsString> {
    std::env::var_os(variable).filter(|value| !value.is_empty())
}

fn file_flag() -> Arg {
    let help = "Read options from this file. Default: $XDG_CONFIG_HOME/tensor-relay/config.toml \
                (~/.config/… if unset), else /etc/tensor-relay/config.toml. Use no file: /dev/null.";
    Arg::new(FILE)
        .long("config")
        .env(format!("{PREFIX}CONFIG"))
        .value_name("FILE")
        .value_parser(value_parser!(PathBuf))
        .value_hint(ValueHint::FilePath)
        .global(true)
        .help_heading(GLOBAL_HEADING)
        .help(help)
}

fn with_variables(command: Command) -> Command {
    match command.get_name() {
        BENCH => command,
        _ => command.mut_args(with_variable).mut_subcommands(with_variables),
    }
}

fn with_variable(arg: Arg) -> Arg {
    let arg = match matches!(arg.get_action(), ArgAction::SetTrue) {
        // A variable or the file may also hold `1`, `yes` or `on` for `true`.
        true => arg.value_parser(BoolishValueParser::new()),
        false => arg,
    };
    let has_none = |long: &&str| arg.get_env().is_none() && !WITHOUT_VARIABLE.contains(long);
    match arg
        .get_long()
        .filter(has_none)
        .map(|long| long.replace('-', "_").to_uppercase())
    {
        Some(name) => arg.env(format!("{PREFIX}{name}")),
        None => arg,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashMap;

    /// Every argument of every command except [`BENCH`], with the command's name.
    fn all(command: &Command) -> Vec<(String, Arg)> {
        let own = command.get_arguments().map(|arg| (command.get_name().to_owned(), arg.clone()));
        let commands = command.get_subcommands().filter(|command| command.get_name() != BENCH);
        own.chain(commands.flat_map(all)).collect()
    }

    #[test]
    fn every_flag_has_a_variable() {
        let flags: Vec<_> = all(&command())
            .into_iter()
            .filter(|(_, arg)| arg.get_long().is_some())
            .collect();
        assert!(flags.len() > 20);
        for (command, arg) in flags {
            let variable = arg.get_env().and_then(|name| name.to_str());
            let is_excluded = WITHOUT_VARIABLE.contains(&arg.get_long().unwrap());
            assert_eq!(variable.is_none(), is_excluded, "{command} {:?}", arg.get_id());
            assert!(variable.is_none_or(|name| name.starts_with(PREFIX)), "{command} {:?}", arg.get_id());
        }
    }

    #[test]
    fn a_variable_has_one_meaning_in_all_commands() {
        let mut meanings = HashMap::new();
        for (command, arg) in all(&command()) {
            let Some(variable) = arg.get_env() else { continue };
            let meaning = (format!("{:?}", arg.get_value_names()), format!("{:?}", arg.get_action()));
            let (other, first) = meanings
                .entry(variable.to_owned())
                .or_insert_with(|| (command.clone(), meaning.clone()));
            assert_eq!(
                *first, meaning,
                "{variable:?} has different meanings in {other} and {command}: give one of them its own `env`"
            );
        }
    }

    #[test]
    fn the_command_line_is_consistent() {
        super::super::switch::with_opposites(command()).debug_assert();
    }
}
