//! [`Setting`]: an option that variables or the file can set.

use super::variable;
use crate::exit::UsageError;
use clap::{
    Arg, ArgAction, ArgMatches, Command,
    error::{ContextKind, ContextValue},
};
use std::error::Error;

/// The commands without a table in the file: the benchmark, and those about the program itself.
const WITHOUT_FILE: [&str; 4] = [variable::BENCH, "config", "completions", "help"];

/// The name of the only option of the temporary command with which [`Setting::parse`] parses a value.
const PROBE: &str = "value";

/// A configurable option of a command.
#[derive(Debug, Clone)]
pub(crate) struct Setting {
    command: String,
    key: String,
    /// The argument, whose defaults are the values of the file, if it has any.
    arg: Arg,
    /// The line of the file with its values.
    line: Option<usize>,
}

/// The value of a setting without flags, by the one rule of precedence below them: variable, file, default.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Effective {
    pub(crate) values: Vec<String>,
    pub(crate) origin: Origin,
}

/// The layer that set a value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Origin {
    Variable,
    File { line: usize },
    Default,
}

/// All settings of all commands, in the order of the help text. The options of subcommands, such as `keys show`, are
/// those of `keys`.
pub(crate) fn all(command: &Command) -> Vec<Setting> {
    let commands = command.get_subcommands().filter(|command| is_configurable(command.get_name()));
    commands.flat_map(of_command).collect()
}

/// Whether the command called `name` may have a table in the file. True for unknown names.
pub(crate) fn is_configurable(name: &str) -> bool {
    !WITHOUT_FILE.contains(&name)
}

/// An argument's key in the file.
pub(crate) fn key_of(arg: &Arg) -> String {
    arg.get_long().unwrap_or_else(|| arg.get_id().as_str()).replace('_', "-")
}

fn of_command(command: &Command) -> Vec<Setting> {
    let mut settings: Vec<Setting> = vec![];
    for arg in arguments(command) {
        let (command, key) = (command.get_name().to_owned(), key_of(arg));
        if !settings.iter().any(|setting| setting.key == key) {
            settings.push(Setting { command, key, arg: arg.clone(), line: None });
        }
    }
    settings
}

/// The configurable arguments of a command and its subcommands: those with a variable.
fn arguments(command: &Command) -> Vec<&Arg> {
    let own = command.get_arguments().filter(|arg| arg.get_env().is_some());
    own.chain(command.get_subcommands().flat_map(arguments)).collect()
}

impl Setting {
    /// Replaces the defaults by the values in `line` of the file.
    pub(super) fn set(&mut self, values: &[String], line: usize) {
        self.arg = self.arg.clone().default_values(values.to_vec()).required(false);
        self.line = Some(line);
    }

    /// The value without flags.
    ///
    /// # Errors
    /// When its variable has an invalid value.
    pub(crate) fn effective(&self) -> Result<Effective, UsageError> {
        let Some(value) = variable::value_of(self.variable()) else {
            let origin = self.line.map_or(Origin::Default, |line| Origin::File { line });
            return Ok(Effective { values: self.defaults(), origin });
        };
        let value = value.to_string_lossy().into_owned();
        self.check(&value).map_err(|reason| {
            let shown = if self.is_secret() { "its value".into() } else { format!("{value:?}") };
            UsageError(format!("the environment variable {} cannot be {shown}: {reason}", self.variable()))
        })?;
        Ok(Effective { values: vec![value], origin: Origin::Variable })
    }

    /// `arg` of clap with the values of the file.
    pub(super) fn layered(&self, arg: Arg) -> Arg {
        match self.line {
            Some(_) => arg.default_values(self.defaults()).required(false),
            None => arg,
        }
    }

    /// The name of the command and of its table.
    pub(crate) fn command(&self) -> &str {
        &self.command
    }

    /// The key in the command's table.
    pub(crate) fn key(&self) -> &str {
        &self.key
    }

    /// The name on the command line, without the value: the flag, or the value name of a positional argument.
    pub(crate) fn name(&self) -> String {
        match self.arg.get_long() {
            Some(long) => format!("--{long}"),
            None => self.value_name(),
        }
    }

    /// The environment variable.
    pub(crate) fn variable(&self) -> &str {
        self.arg.get_env().and_then(|name| name.to_str()).unwrap_or_default()
    }

    /// The placeholder of the value in help texts.
    pub(crate) fn value_name(&self) -> String {
        let names = self.arg.get_value_names().unwrap_or_default();
        names.first().map_or_else(|| self.key.to_uppercase(), ToString::to_string)
    }

    /// The default values.
    pub(crate) fn defaults(&self) -> Vec<String> {
        let defaults = self.arg.get_default_values().iter();
        defaults.map(|value| value.to_string_lossy().into_owned()).collect()
    }

    /// Whether the value must never be printed.
    pub(crate) fn is_secret(&self) -> bool {
        self.arg.is_hide_env_values_set()
    }

    pub(crate) fn is_switch(&self) -> bool {
        matches!(self.arg.get_action(), ArgAction::SetTrue)
    }

    pub(crate) fn is_repeatable(&self) -> bool {
        matches!(self.arg.get_action(), ArgAction::Append)
    }

    /// Whether the setting accepts any number of values `NAME=…`, for which the file may have a table.
    pub(crate) fn accepts_pairs(&self) -> bool {
        self.is_repeatable() && self.value_name().contains('=')
    }

    /// Whether `key` names this setting, with dashes or underscores; for a table of pairs also as a plural.
    pub(crate) fn is_called(&self, key: &str) -> bool {
        let key = key.replace('_', "-");
        key == self.key || (self.accepts_pairs() && key.strip_suffix('s') == Some(&self.key))
    }

    /// Whether the value of `other` applies to this setting too.
    pub(crate) fn means_the_same_as(&self, other: &Self) -> bool {
        self.key == other.key && self.variable() == other.variable()
    }

    /// Whether `arg` of `command` is this setting.
    pub(crate) fn is(&self, command: &str, arg: &Arg) -> bool {
        self.command == command && self.key == key_of(arg)
    }

    /// Validates `value` with the option's own parser.
    ///
    /// # Errors
    /// Why it is invalid, as a clause.
    pub(crate) fn check(&self, value: &str) -> Result<(), String> {
        self.parse(value).map(|_| ())
    }

    /// `value` in its display form: for a switch, `true` or `false` for any spelling such as `yes`.
    pub(crate) fn display(&self, value: &str) -> String {
        let parsed = self.parse(value).ok().filter(|_| self.is_switch());
        let is_on = parsed.and_then(|matches| matches.get_one::<bool>(PROBE).copied());
        is_on.map_or_else(|| value.into(), |is_on| is_on.to_string())
    }

    fn parse(&self, value: &str) -> Result<ArgMatches, String> {
        let mut probe = Arg::new(PROBE).long(PROBE).value_parser(self.arg.get_value_parser().clone());
        if let Some(delimiter) = self.arg.get_value_delimiter() {
            probe = probe.action(ArgAction::Append).value_delimiter(delimiter);
        }
        let command = Command::new("check").no_binary_name(true).arg(probe);
        let checked = command.try_get_matches_from([format!("--{PROBE}={value}")]);
        checked.map_err(|error| reason(&error))
    }
}

/// Joins alternatives: `a`, `a or b`, `a, b or c`.
fn alternatives(words: &[String]) -> String {
    match words {
        [first @ .., before, last] => {
            first.iter().map(|word| format!("{word}, ")).collect::<String>() + before + " or " + last
        }
        words => words.concat(),
    }
}

/// The reason for an error of clap about a value, as a clause.
fn reason(error: &clap::Error) -> String {
    match (error.source(), error.get(ContextKind::ValidValue)) {
        (Some(source), _) => source.to_string(),
        (None, Some(ContextValue::Strings(valid))) if !valid.is_empty() => {
            format!("write {}", alternatives(valid))
        }
        _ => "it is empty".into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn setting(command: &str, key: &str) -> Setting {
        let settings = all(&variable::command());
        settings
            .into_iter()
            .find(|s| s.command() == command && s.is_called(key))
            .unwrap()
    }

    #[test]
    fn keys_are_the_names_of_flags_and_positionals() {
        assert_eq!(setting("serve", "state_dir").name(), "--state-dir");
        assert_eq!(setting("subscribe", "ticket").name(), "TICKET");
        assert_eq!(setting("keys", "state-dir").variable(), "TENSOR_RELAY_STATE_DIR");
        assert!(setting("serve", "topics").accepts_pairs());
        assert!(!setting("subscribe", "topic").is_called("topics"));
        assert!(setting("list", "ticket").is_secret());
    }

    #[test]
    fn keys_are_unique_within_a_command() {
        let settings = all(&variable::command());
        for setting in &settings {
            let same_key = settings
                .iter()
                .filter(|s| s.command() == setting.command() && s.is_called(setting.key()));
            assert_eq!(same_key.count(), 1, "{} {}", setting.command(), setting.key());
        }
    }

    #[test]
    fn values_are_validated_by_the_options_own_parser() {
        assert_eq!(setting("serve", "codec").check("zstd"), Ok(()));
        assert_eq!(
            setting("serve", "codec").check("lz4"),
            Err("write auto, raw, zstd, bitplanes, planes or sparse".into())
        );
        assert!(
            setting("serve", "chunk-size")
                .check("7")
                .unwrap_err()
                .contains("multiple of 256")
        );
        assert_eq!(setting("serve", "json").check("on"), Ok(()));
        assert_eq!(setting("serve", "json").display("on"), "true");
        assert_eq!(setting("subscribe", "out").display("on"), "on");
        assert!(setting("serve", "json").check("maybe").is_err());
        assert_eq!(setting("serve", "advertise").check("a,b:1"), Ok(()));
        assert_eq!(setting("subscribe", "out").check(""), Err("it is empty".into()));
        assert!(setting("serve", "grace").check("-1").is_err());
    }
}
