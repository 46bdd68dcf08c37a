//! The layers below the flags: variables, the file and the defaults.

use super::{
    file::File,
    setting::{self, Setting},
    switch, variable,
};
use crate::exit::UsageError;
use clap::{
    Arg, Command,
    builder::Resettable,
    error::{ContextKind, ContextValue},
};
use std::{
    ffi::{OsStr, OsString},
    fs,
    io::{self, Read},
    path::{Path, PathBuf},
};

/// The last path of the search for the file.
const SYSTEM_FILE: &str = "/etc/tensor-relay/config.toml";

/// The maximum size of the file, far above that of a file with every option.
const FILE_MAX_BYTES: u64 = 1 << 20;

/// The commands, their settings, and the layers below the flags.
#[derive(Debug)]
pub(crate) struct Layers {
    command: Command,
    settings: Vec<Setting>,
    file: Option<File>,
}

/// The value of a setting without flags.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct EffectiveSetting {
    pub(crate) values: Vec<String>,
    pub(crate) origin: Origin,
}

/// The layer that set a value.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Origin {
    Variable,
    File { line: usize },
    Default,
}

impl Layers {
    /// Reads the file at `given`, or else the first one of [`search_paths`].
    ///
    /// # Errors
    /// When there is no file at `given`, or the file cannot be read or is invalid.
    pub(crate) fn find(command: Command, given: Option<&Path>) -> anyhow::Result<Self> {
        let mut layers = Self::without_file(command);
        if let Some((path, text)) = find_file(given)? {
            layers.file = Some(File::parse(&path, &text, &layers.settings)?);
        }
        Ok(layers)
    }

    /// The layers without a file: variables and defaults.
    pub(crate) fn without_file(command: Command) -> Self {
        let settings = setting::all(&command);
        Self { command, settings, file: None }
    }

    /// All settings, command by command.
    pub(crate) fn settings(&self) -> &[Setting] {
        &self.settings
    }

    /// The file, if there is one.
    pub(crate) fn file(&self) -> Option<&File> {
        self.file.as_ref()
    }

    /// The command with the file's values as defaults. `off` has the ids of the switches that flags turn off: the file
    /// and variables do not apply to them.
    pub(super) fn command(&self, off: &[String]) -> Command {
        let command = self.command.clone().mut_args(|arg| self.layered_arg(arg, "", off));
        let command = command.mut_subcommands(|command| {
            let table = command.get_name().to_owned();
            self.layered(command, &table, off)
        });
        switch::with_opposites(command)
    }

    /// The effective value of `setting`.
    ///
    /// # Errors
    /// When its variable has an invalid value.
    pub(crate) fn effective(&self, setting: &Setting) -> Result<EffectiveSetting, UsageError> {
        if let Some(value) = variable::value_of(setting.variable()) {
            let value = value.to_string_lossy().into_owned();
            setting.check(&value).map_err(|reason| invalid_variable(setting, &reason))?;
            return Ok(EffectiveSetting { values: vec![value], origin: Origin::Variable });
        }
        let entry = self.file.as_ref().and_then(|file| file.entry(setting));
        Ok(match entry {
            Some(entry) => {
                EffectiveSetting { values: entry.values.clone(), origin: Origin::File { line: entry.line } }
            }
            None => EffectiveSetting { values: setting.defaults(), origin: Origin::Default },
        })
    }

    /// Replaces clap's error about the value of a variable, which names a flag that the user never typed, by one that
    /// names the variable.
    pub(super) fn explain(
        &self,
        error: clap::Error,
        command: Option<&str>,
        argv: &[OsString],
    ) -> anyhow::Error {
        let error = self.without_hidden_commands(error);
        let (Some(ContextValue::String(arg)), Some(ContextValue::String(value))) =
            (error.get(ContextKind::InvalidArg), error.get(ContextKind::InvalidValue))
        else {
            return error.into();
        };
        let is_typed = |setting: &&Setting| argv.iter().any(|word| may_contain(word, setting, value));
        let mut settings = self.settings.iter().filter(|setting| Some(setting.command()) == command);
        let setting = settings
            .find(|setting| setting.is_shown_as(arg))
            .filter(|setting| !is_typed(setting));
        match setting.map(|setting| self.effective(setting)) {
            Some(Err(invalid)) => invalid.into(),
            _ => error.into(),
        }
    }

    /// Removes hidden commands from clap's suggestions.
    fn without_hidden_commands(&self, mut error: clap::Error) -> clap::Error {
        const KIND: ContextKind = ContextKind::SuggestedSubcommand;
        let hidden = |name: &String| self.command.find_subcommand(name).is_some_and(Command::is_hide_set);
        if let Some(ContextValue::Strings(mut names)) = error.remove(KIND) {
            names.retain(|name| !hidden(name));
            if !names.is_empty() {
                error.insert(KIND, ContextValue::Strings(names));
            }
        }
        error
    }

    /// `command` and its subcommands, with the values of the layers for their arguments.
    fn layered(&self, command: Command, table: &str, off: &[String]) -> Command {
        let command = command.mut_args(|arg| self.layered_arg(arg, table, off));
        command.mut_subcommands(|command| self.layered(command, table, off))
    }

    fn layered_arg(&self, arg: Arg, table: &str, off: &[String]) -> Arg {
        let is_off = off.iter().any(|id| arg.get_id() == id.as_str());
        let arg = match arg.get_env().and_then(OsStr::to_str) {
            Some(name) if is_off || variable::value_of(name).is_none() => arg.env(Resettable::Reset),
            _ => arg,
        };
        let setting = self.settings.iter().find(|setting| !is_off && setting.is(table, &arg));
        let entry = setting.and_then(|setting| self.file.as_ref()?.entry(setting));
        match entry {
            Some(entry) => arg.default_values(entry.values.clone()).required(false),
            None => arg,
        }
    }
}

/// Whether the command line word `word` may be the source of `value` for `setting`.
fn may_contain(word: &OsStr, setting: &Setting, value: &str) -> bool {
    let word = word.to_string_lossy();
    word == value || word.starts_with(&format!("{}=", setting.name()))
}

fn invalid_variable(setting: &Setting, reason: &str) -> UsageError {
    let variable = setting.variable();
    let shown = match variable::value_of(variable) {
        Some(value) if !setting.is_secret() => format!("{:?}", value.to_string_lossy()),
        _ => "its value".into(),
    };
    UsageError(format!("the environment variable {variable} cannot be {shown}: {reason}"))
}

/// The path and content of the file at `given`, or else of the first file of [`search_paths`].
fn find_file(given: Option<&Path>) -> anyhow::Result<Option<(PathBuf, String)>> {
    if let Some(path) = given {
        return Ok(Some((path.into(), read(path)?)));
    }
    for path in search_paths(variable::value_of) {
        // Only a missing file is skipped: the user probably expects an unreadable one to be used.
        match path.try_exists() {
            Ok(false) => {}
            _ => return Ok(Some((path.clone(), read(&path)?))),
        }
    }
    Ok(None)
}

/// The paths at which the file is searched for, in order: in the XDG configuration directory, then in the system's.
pub(crate) fn search_paths(variable: impl Fn(&str) -> Option<OsString>) -> Vec<PathBuf> {
    let user = variable("XDG_CONFIG_HOME").map(PathBuf::from);
    let user = user.or_else(|| variable("HOME").map(|home| Path::new(&home).join(".config")));
    let user = user.map(|dir| dir.join("tensor-relay/config.toml"));
    user.into_iter().chain([SYSTEM_FILE.into()]).collect()
}

fn read(path: &Path) -> Result<String, UsageError> {
    let mut text = String::new();
    let length =
        fs::File::open(path).and_then(|file| file.take(FILE_MAX_BYTES + 1).read_to_string(&mut text));
    let length = match length {
        Ok(length) if length as u64 > FILE_MAX_BYTES => {
            Err(io::Error::new(io::ErrorKind::FileTooLarge, "it is longer than 1 MiB"))
        }
        length => length,
    };
    length.map_err(|error| {
        UsageError(format!(
            "cannot read the configuration file {}: {error}; choose another one with --config",
            path.display()
        ))
    })?;
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn layers_with_file(text: &str) -> Layers {
        let mut layers = Layers::without_file(variable::command());
        layers.file = Some(File::parse(Path::new("c.toml"), text, &layers.settings).unwrap());
        layers
    }

    #[test]
    fn effective_values_are_the_defaults_that_clap_uses() {
        let layers = layers_with_file(
            "[default]\nconnect-timeout = 3\n[serve]\ntopic = ['a=b', 'c=d']\njson = true\n[list]\nticket = 't'",
        );
        let mut set_count = 0;
        for setting in layers.settings() {
            let effective = layers.effective(setting).unwrap();
            if effective.origin == Origin::Default {
                assert_eq!(effective.values, setting.defaults());
            }
            let command = layers.command(&[]);
            let command = command.find_subcommand(setting.command()).unwrap();
            let Some(arg) = command.get_arguments().find(|arg| setting.is(setting.command(), arg)) else {
                continue;
            };
            let defaults: Vec<_> = arg.get_default_values().iter().map(|v| v.to_str().unwrap()).collect();
            assert_eq!(defaults, effective.values, "{} {}", setting.command(), setting.key());
            set_count += usize::from(effective.origin != Origin::Default);
        }
        assert_eq!(set_count, 6, "connect-timeout three times, topic, json, ticket");
    }

    #[test]
    fn the_users_file_is_searched_for_before_the_systems() {
        let paths = |pairs: &[(&str, &str)]| {
            let found = search_paths(|name| {
                pairs.iter().find(|(key, _)| *key == name).map(|(_, value)| value.into())
            });
            found.iter().map(|path| path.display().to_string()).collect::<Vec<_>>()
        };
        let system = SYSTEM_FILE.to_owned();
        let both = paths(&[("XDG_CONFIG_HOME", "/x"), ("HOME", "/h")]);
        assert_eq!(both, ["/x/tensor-relay/config.toml".into(), system.clone()]);
        assert_eq!(paths(&[("HOME", "/h")]), ["/h/.config/tensor-relay/config.toml".into(), system.clone()]);
        assert_eq!(paths(&[]), [system]);
    }

    #[test]
    fn an_endless_file_is_refused() {
        assert!(
            read(Path::new("/dev/zero"))
                .unwrap_err()
                .to_string()
                .contains("longer than 1 MiB")
        );
        assert_eq!(read(Path::new("/dev/null")).unwrap(), "");
    }
}
